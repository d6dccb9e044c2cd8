"""One class under one plan against one device: both train two steps in float64 on threads."""

from __future__ import annotations

import copy
import functools
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.census.configs import LENGTH, VOCABULARY
from plait.comm import World
from plait.comm.simulated import simulate
from plait.config import Train
from plait.engine.state.start import make_whole
from plait.errors import PlaitError
from plait.mesh import Mesh
from plait.plan import Plan
from plait.verify.problem import Problem
from plait.verify.report import Report
from plait.verify.run import VerifyTask, in_world

STEPS = 2
SAMPLES = 8
_MAKING = threading.Lock()


@dataclass(frozen=True)
class Cell:
    """A verdict: equal, refused (a sentence of plait), wrong, crashed, none (does not apply)."""

    task: str
    family: str
    plan: str
    verdict: str
    reason: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The record of a worker's line."""
        return asdict(self)


@dataclass(frozen=True)
class OnThreads(Problem):
    """A problem whose ranks share a process, and so one generator of random numbers.

    Models are made by one thread at a time, since the library patches torch meanwhile. Their
    `start` is drawn before there are threads.
    """

    start: nn.Module | None = None

    def make_model(self) -> nn.Module:
        """On the meta device."""
        with _MAKING:
            model = super().make_model()
            if self.start is not None:
                give: Any = model
                give.make_start = functools.partial(copy.deepcopy, self.start)
            return model

    def drawn(self) -> OnThreads:
        """This problem with its start."""
        make: Any = self.make_model().make_start
        return replace(self, start=make_whole(make, self.train.seed))


@contextmanager
def one_generator() -> Iterator[None]:
    """Let pipelines take the generator as untouched: threads share it, and nothing is dropped."""
    state = torch.get_rng_state()
    before = torch.get_rng_state
    torch.get_rng_state = lambda: state
    try:
        yield
    finally:
        torch.get_rng_state = before


def problem_of(task: str, table: Mapping[str, Any]) -> Problem:
    """Two steps of eight random samples."""
    model = {"name": "hf", "config": dict(table), "vocab_size": VOCABULARY}
    data = {"name": "random", "seq_len": LENGTH, "image_size": table.get("image_size", 32)}
    problem = OnThreads(
        {key: value for key, value in {**model, "task": task}.items() if key != "vocab_size"},
        {**data, "vocab_size": VOCABULARY},
        Train(global_batch=SAMPLES, steps=STEPS, optimizer="sgd"),
    )
    return problem.drawn()


def judge(task: str, table: Mapping[str, Any], plan_text: str) -> Cell:
    """The verdict on one class under one plan; every failure is one."""
    begin = time.perf_counter()
    family = str(table["model_type"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = problem_of(task, table)
            if nothing := _nothing_to_split(problem, Plan.parse(plan_text)):
                return Cell(task, family, plan_text, "none", nothing, 0.0)
            report = _report(problem, plan_text)
        verdict, reason = _verdict(report)
    except PlaitError as refusal:
        verdict, reason = "refused", str(refusal)
    except Exception as failure:
        verdict, reason = "crashed", _crash(failure)
    seconds = time.perf_counter() - begin
    return Cell(task, family, plan_text, verdict, " ".join(reason.split()), round(seconds, 2))


def _nothing_to_split(problem: OnThreads, plan: Plan) -> str:
    """Why a plan means nothing for a class; empty where it means something."""
    assert problem.start is not None
    words = [f"{name} {type(one).__name__}".lower() for name, one in problem.start.named_modules()]
    if plan.ep > 1 and not any("experts" in word for word in words):
        return "it has no experts"
    if plan.cp.size > 1 and not any("att" in word.replace("flatten", "") for word in words):
        return "it has no attention"
    return ""


def _report(problem: Problem, plan_text: str) -> Report:
    plan = Plan.parse(f"{plan_text} precision:float64").check()
    asked = VerifyTask(problem, str(plan), STEPS, None, ("sgd",), final=True)

    def rank(world: World) -> Report:
        together = False  # a rank that fails leaves alone, so that its own error is seen
        try:
            report = in_world(world, asked)
            together = True
            return report
        finally:
            world.close(together=together)

    with one_generator():
        return simulate(Mesh.of(plan), rank, timeout_seconds=30.0)[0]


def _verdict(report: Report) -> tuple[str, str]:
    part = report.parts[0]
    refusals = [*report.refusals, *part.refusals]
    if refusals:
        return "wrong", f"nothing was proved: {refusals[0]}"
    if report.ok:
        limit = part.passes("loss", "count", "grad", "grad_norm", "param", "start", "buffer")
        return "equal", "" if limit <= 1e-10 else f"parts in a lower precision, within {limit:.1e}"
    worst = report.worst
    assert worst is not None
    why = part.all_findings[0].text if part.all_findings else ""
    return "wrong", f"{worst.kind} {worst.name} is {worst.error:.1e} away; {why}"


def _crash(failure: Exception) -> str:
    last = traceback.extract_tb(failure.__traceback__)[-1]
    where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
    return f"{type(failure).__name__} at {where}: {failure}"
