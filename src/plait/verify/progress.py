"""Progress of a proof in words, and the moment at which its time is used up.

Seconds are predicted from one step of one device, and again from the parts that are done.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm import World
from plait.plan import Plan
from plait.verify.problem import Problem
from plait.verify.reference.one_device import run_reference

START_SECONDS = 3.0  # of new ranks that load torch
PROBE_SECONDS = 0.5  # of a probe on a model of no size
MOVED = 0.1  # of the norm of the parameters


@dataclass(frozen=True)
class Clock:
    """A time budget. `until` is the moment on `time.time()` at which it is used up; None: never.

    `speaks`: whether progress is printed on stderr.
    """

    until: float | None = None
    speaks: bool = False
    begun: float = field(default_factory=time.time)

    @classmethod
    def of(cls, budget: float | None, speaks: bool = False) -> Clock:
        """A clock that starts now; `budget` in seconds."""
        until = None if budget is None else time.time() + budget
        return cls(until, speaks)

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self.until is not None and time.time() >= self.until

    def is_over_for_all(self, world: World) -> bool:
        """The first rank's answer, alike on all. Collective where there is a budget."""
        if self.until is None:
            return False
        answer: bool = world.axis("world").gather_objects(self.is_over)[0]
        return answer

    def say(self, message: str) -> None:
        """Print a line on stderr where progress is wanted."""
        if self.speaks:
            print(f"plait verify: {message}", file=sys.stderr, flush=True)

    def tell(self, number: int, count: int, name: str) -> None:
        """Say which part of `count` begins, and about how long the rest takes."""
        gone = time.time() - self.begun
        left = ""
        if number > 1:
            left = f", about {gone / (number - 1) * (count - number + 1):.0f} s left"
        self.say(f"{name} ({number} of {count}{left})")


@dataclass(frozen=True)
class FirstStep:
    """One step of one device in float64: the seconds it took, and the learning rate it allows.

    At `rate` a step of SGD without momentum moves the parameters by a tenth of their norm.
    """

    seconds: float
    rate: float

    @classmethod
    def of(cls, problem: Problem) -> FirstStep:
        """Measured, with the problem's own model, batch and loss."""
        model = problem.make_whole_model(torch.float64)
        batches = problem.batches(1, torch.float64)
        begun = time.perf_counter()
        record = run_reference(model, batches, problem.recipe())
        seconds = time.perf_counter() - begun
        grads = [one for one in record.steps[0].grads.values() if one is not None]
        norm, slope = norm_of((record.start or {}).values()), norm_of(grads)
        rate = MOVED * norm / slope if norm and slope and math.isfinite(slope) else math.inf
        return cls(seconds, rate)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm over all numbers of several tensors [...]."""
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def predicted_seconds(step: float, plan: Plan, steps: int, num_probes: int) -> float:
    """About how long a proof takes on this machine, where one device takes `step` seconds."""
    crowd = max(1.0, plan.world_size / (os.cpu_count() or 1))
    return START_SECONDS + num_probes * (PROBE_SECONDS * crowd + steps * step * (1 + crowd))
