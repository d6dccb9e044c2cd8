"""The guard of the update: a step whose loss or gradient is no number, or a spike, changes nothing.

The sums that it looks at are equal on every rank, so all decide alike without asking. Only then is
the origin looked for.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.doctor.findings import RunFinding
from plait.engine.loss import LossTotals
from plait.engine.options import Options
from plait.engine.suspect import SPIKE_FACTOR, Origin, StepSizes, Suspect, loudest, origin_of
from plait.errors import NonFiniteLoss, NotAvailable
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.values import JsonObject

HISTORY: Final = 32
LEAST_HISTORY: Final = 3

Tell = Callable[[RunFinding], None]


class Guard:
    """Judges each step of one engine. The answer to a bad one is `stop`, `skip` or `back`.

    `spike_factor` is the multiple of the median gradient norm from which a step is judged so too.

    Attributes:
        skipped: whether the last step was dropped.
        rolls_back: whether an earlier state is to be loaded, and the steps since replayed.
        listeners: they are called with each finding, on every rank.
    """

    def __init__(self, answer: str = "stop", *, spike_factor: float | None = None) -> None:
        self.skipped = False
        self.rolls_back = False
        self.listeners: list[Tell] = []
        self._answer = answer
        self._factor = spike_factor
        self._norms: deque[tuple[int, float]] = deque(maxlen=HISTORY)
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._replayed_from = 0
        self._tried: set[int] = set()
        self._open: dict[int, RunFinding] = {}

    def begin(self, model: nn.Module, *, keeps: bool = False) -> None:
        """A step begins; buffers that a dropped step would change are kept, under `stop` where
        `keeps` asks for it.

        Raises:
            NotAvailable: an earlier state was to be loaded first.
        """
        if self.rolls_back:
            raise NotAvailable(
                "on_nan 'back': the last step was no number; load an earlier state and call "
                "engine.guard.rolled_back(step) before the next one, or take on_nan 'skip'"
            )
        self.skipped = False
        if keeps or self._answer != "stop":
            with torch.no_grad():
                self._buffers = [(one, one.clone()) for one in model.buffers()]

    def judge(
        self,
        totals: LossTotals,
        step: int,
        suspect: Suspect,
        *,
        norm: bool = True,
        sizes: Callable[[], StepSizes] | None = None,
    ) -> bool:
        """Whether the step counts. Collective where it does not.

        `sizes` are those of the step, where another one is under way by now. Errors: those of
        `LossTotals.check`, with the origin where a number is none.
        """
        if not suspect.together:
            if totals.count:
                totals.check(step, norm=norm)
            return True
        totals.check_counts(step)
        wrong = totals.not_finite(norm=norm)
        if wrong is not None:
            finding = _finding("nan", step, origin_of(suspect))
            return self._refuse(finding, f"{totals.complaint(step, wrong)}. ")
        told = sizes or suspect.sizes
        counts = not norm or self._is_usual(totals.grad_norm, step, suspect.world, told)
        if counts and step in self._open:
            passing = self._open.pop(step)
            self._report(self._judged(passing, "passing", "is finite"))
        return counts

    def refuse_passing(
        self, totals: LossTotals, step: int, losses: Sequence[float], world: World
    ) -> bool:
        """Whether a step counts that was no number, as `totals` say, and is one when made again.

        It is not to count, as its first making has changed buffers. `losses` are those of this
        rank's micro-batches then. Collective. Errors: `NonFiniteLoss`, where the run is to end.
        """
        first = next((index for index, one in enumerate(losses) if not math.isfinite(one)), None)
        told: list[int | None] = world.axis("world").gather_objects(first)
        rank = next((rank for rank, one in enumerate(told) if one is not None), 0)
        where = "the step" if told[rank] is None else f"micro-batch {told[rank]}"
        cause = "passing: a replay of the step is finite, so a value changed for a moment"
        finding = _finding("nan", step, (rank, Origin(5, where, cause, micro_batch=told[rank])))
        wrong = totals.not_finite() or "the step was refused"
        return self._refuse(finding, f"{totals.complaint(step, wrong)}. ")

    @property
    def decides_by_size(self) -> bool:
        """Whether a gradient that is too large is no step, which only the host knows."""
        return self._factor is not None

    @property
    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers [...] of the model, each with its values before the step; empty under `stop`."""
        return self._buffers

    def rolled_back(self, step: int) -> None:
        """Training goes on after this earlier step, whose state has been loaded."""
        self.rolls_back = False
        self._replayed_from = step
        kept = [one for one in self._norms if one[0] <= step]
        self._norms = deque(kept, maxlen=HISTORY)

    def _is_usual(
        self, size: float, step: int, world: World, sizes: Callable[[], StepSizes]
    ) -> bool:
        """Whether a gradient is of the size of those before; findings say where it is not."""
        known = sorted(norm for _, norm in self._norms)
        middle = statistics.median(known) if len(known) >= LEAST_HISTORY else math.inf
        factor = SPIKE_FACTOR if self._factor is None else self._factor
        if middle == 0.0 or size <= factor * middle:
            self._norms.append((step, size))
            return True
        finding = _finding("spike", step, loudest(world, sizes(), size, middle))
        if self._factor is None:
            self._report(finding)
            self._norms.append((step, size))
            return True
        complaint = (
            f"step {step}: the gradient norm is {size:.4g}, {size / middle:.1f} times the "
            f"median of the last {len(known)} steps, and [recovery] spike_factor is "
            f"{factor:g}; the parameters are still those of step {step - 1}. "
        )
        return self._refuse(finding, complaint)

    def _refuse(self, finding: RunFinding, complaint: str) -> bool:
        """Answer a step that is not to count. A step that is replayed is never so again.

        Errors: `NonFiniteLoss`, where the run is to end.
        """
        step = finding.step
        assert step is not None
        if self._answer == "back":
            if step not in self._tried:
                self._tried.add(step)
                self._open[step] = finding
                self.rolls_back = True
                self._drop()
                return False
            finding = self._judged(finding, "lasting", "gives it again")
        self._report(finding)
        if self._answer == "skip":
            self._drop()
            return False
        raise NonFiniteLoss(complaint + _sentence(finding))

    def _judged(self, finding: RunFinding, kind: str, told: str) -> RunFinding:
        """The finding, with the word of the replay."""
        first = finding.cause.removeprefix("passing: ")
        cause = f"{kind}: a replay from step {self._replayed_from} {told}; {first}"
        details = {**finding.details, "replayed_from": self._replayed_from}
        return replace(finding, cause=cause, details=details)

    def _drop(self) -> None:
        self.skipped = True
        put_back(self._buffers)

    def _report(self, finding: RunFinding) -> None:
        for listener in self.listeners:
            listener(finding)


def put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give buffers [...] the values that were kept of them."""
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _finding(kind: str, step: int, found: tuple[int, Origin]) -> RunFinding:
    rank, origin = found
    details: JsonObject = {"module": origin.module, "micro_batch": origin.micro_batch}
    details["samples"] = list(origin.samples)
    return RunFinding(kind, rank, step, origin.where, origin.cause, details=details)


def _sentence(finding: RunFinding) -> str:
    return f"It began on rank {finding.rank}, in {finding.where}: {finding.cause}"


def make_guard(plan: Plan, options: Options) -> Guard:
    """The guard of an engine. Errors: `NotAvailable` where a step cannot be dropped as a whole."""
    together = STRATEGIES[plan.dp.strategy].synchronous
    drains = not SCHEDULES[plan.pp.schedule].asynchronous
    if options.on_nan != "stop" and not (together and drains):
        raise NotAvailable(
            f"'{plan}': on_nan '{options.on_nan}' drops a step on all ranks at once, and those of "
            "this plan do not step together; use on_nan 'stop', or a synchronous plan"
        )
    return Guard(options.on_nan, spike_factor=options.spike_factor)
