"""A planted fault, and how it is judged: on ranks that are processes, as each has a generator of
random numbers of its own.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.comm import World
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.plan import Plan
from plait.verify import Report
from plait.verify.probes import with_optimizer
from plait.verify.problem import Problem, with_keys
from plait.verify.record.observation import Record
from plait.verify.record.observe import join
from plait.verify.resumed import Leg, _first_leg, _second_leg
from plait.verify.run import VerifyTask, in_world, verify
from plait.verify.training import prove
from tests.parity.verify_problems import problem

Patches = Callable[[], list[Any]]
STEPS = 2
ONE_DEVICE = "one device"  # the axis of a fault that every plan has


@dataclass(frozen=True)
class Entry:
    """A fault with what `verify` must say of it: its cause, its axis, and its module if it has one.

    `how` says what is judged: a plan (`probe`), a run that was saved and loaded (`resume`), or the
    precision of training (`training`). `keys` are of [train], `model_keys` of [model]. The axis of
    a finding that knows none is that of the smallest plan that fails.
    """

    name: str
    plan: str
    cause: str
    axis: str
    patches: Patches
    probe: str = "sgd"
    model: str = "gpt"
    module: str = ""
    how: str = "probe"
    keys: dict[str, Any] = field(default_factory=dict)
    model_keys: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.patches():
                stack.enter_context(one)
            yield

    @property
    def problem(self) -> Problem:
        found = problem(self.model, **self.keys)
        return replace(found, model={**found.model, **self.model_keys})


@dataclass(frozen=True)
class Answer:
    """The report, and the cause and axis in it that were asked for; `wrong` says what is not."""

    report: Report
    cause: str
    axis: str
    wrong: str
    seconds: float


Runner = Callable[..., list[Any]]


def judged(entry: Entry, run: Runner) -> Answer:
    """Plant a fault and judge it. `run(n, fn, *args, plan=...)` runs processes."""
    begun = time.perf_counter()
    report = report_of(entry, run)
    found = [one for one in report.all_findings if one.cause == entry.cause]
    axes = [axis for one in found for axis in one.axis.split("+") if axis]
    bisected = [one.axis for one in report.all_findings if one.cause == "bisected"]
    axes += [axis or ONE_DEVICE for one in bisected for axis in one.split("+")]
    names = " ".join(name for one in found for name in one.names)
    wrong = ""
    if report.ok:
        wrong = "passed"
    elif not found:
        wrong = f"the cause is not named: {_causes(report)}"
    elif entry.axis not in axes:
        wrong = f"the axis is not named: {axes}"
    elif entry.module not in names:
        wrong = f"the module is not named: {names}"
    cause = found[0].cause if found else ""
    axis = "+".join(dict.fromkeys(axes))
    return Answer(report, cause, axis, wrong, time.perf_counter() - begun)


def _causes(report: Report) -> str:
    told = [f"{one.cause} ({one.axis}): {one.text}" for one in report.all_findings]
    return "; ".join([*told, *report.refusals]) or report.text()


def report_of(entry: Entry, run: Runner) -> Report:
    """The report on a planted fault. The axis is looked for where the findings do not have it."""
    if entry.how == "resume":
        return _on_ranks(entry, run, entry.plan, resumed_on_rank, first_leg(entry))
    if entry.how == "training":
        return _on_ranks(entry, run, entry.plan, training_on_rank)
    plan = f"{entry.plan} precision:float64"
    task = VerifyTask(entry.problem, plan, entry.steps, None, (entry.probe,))

    def runner(one: VerifyTask) -> Report:
        return _on_ranks(entry, run, one.plan, proof_on_rank, one)

    report = verify(task, runner, blame=False)
    causes = [one for one in report.all_findings if one.cause == entry.cause]
    if report.ok or not causes or any(entry.axis in one.axis.split("+") for one in causes):
        return report
    return verify(task, runner)


def _on_ranks(
    entry: Entry, run: Runner, plan: str, fn: Callable[..., Report], *args: Any
) -> Report:
    sent = entry if entry.patches is list else entry.name  # patches cannot be sent
    size = Plan.parse(plan).world_size
    report: Report = run(size, _in_process, sent, fn, *args, plan=plan)[0]
    return report


def _in_process(world: World, entry: Entry | str, fn: Callable[..., Report], *args: Any) -> Report:
    if isinstance(entry, str):
        from tests.parity.planted.table import BY_NAME

        entry = BY_NAME[entry]
    with entry.planted():
        return fn(world, entry, *args)


def proof_on_rank(world: World, entry: Entry, task: VerifyTask) -> Report:
    return in_world(world, task)


def training_on_rank(world: World, entry: Entry) -> Report:
    return prove(world, entry.problem, Plan.parse(entry.plan), entry.steps)


def resumed_on_rank(world: World, entry: Entry, before: tuple[str, Record]) -> Report:
    """The second leg of a run, with a fault that only a load meets."""
    folder, record = before
    return _second_leg(world, replace(_leg(entry, folder), before=record))


def first_leg(entry: Entry) -> tuple[str, Record]:
    """The checkpoint of a right first leg, made once for all faults of a load."""
    key = (entry.plan, entry.model, str(entry.model_keys))
    if key not in _SAVED:
        folder = tempfile.mkdtemp(prefix="plait-planted-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        leg = _leg(entry, str(Path(folder) / "saved"))
        records = simulate(Mesh.of(Plan.parse(entry.plan)), _first_leg, leg)[0]
        _SAVED[key] = (leg.folder, join(records))
    return _SAVED[key]


_SAVED: dict[tuple[str, str, str], tuple[str, Record]] = {}


def _leg(entry: Entry, folder: str) -> Leg:
    """Both legs have a schedule, and an epoch ends after the load."""
    keys = {"schedule": "cosine", "warmup_steps": 1, "steps": 2 * entry.steps + 2}
    base = with_optimizer(entry.problem, "adamw")
    samples = base.train.global_batch * 2 * entry.steps - base.train.global_batch // 2
    changed = replace(base, train=with_keys(base.train, **keys), num_samples=samples)
    plan = f"{entry.plan} precision:float64"
    return Leg(changed, plan, entry.steps, folder, None, plan)
