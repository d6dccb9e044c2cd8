"""Replicas compared: ranks that hold the same parameters must hold the same bits.

`[recovery] check_replicas_every = N` compares them before the update of every N-th step, by a sum
over the bits of each parameter. Of three or more the odd one is at fault. Of two, a rank whose
parameters have changed between two updates, when nothing may change them, is. Where none have, the
updates themselves are done again (`plait.run.replica_replay`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from plait.doctor.findings import RunFinding
from plait.engine.engine import Engine
from plait.errors import NotAvailable, RunError
from plait.run.bit_sums import Marks, Place, marks_of
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.replica_replay import ReplicaReplay, Verdict, replica_replay


@dataclass(frozen=True)
class ReplicaSums:
    """One rank's marks, and the places that have changed between two updates."""

    marks: Marks
    changed: frozenset[Place]


class CompareReplicas(Hook):
    """Compares every `every` steps, and ends the run where a replica is damaged. For all ranks."""

    def __init__(self, every: int, report: Callable[[RunFinding], None]) -> None:
        self._every = every
        self._report = report
        self._last: Marks = {}
        self._changed: set[Place] = set()
        self._replay: ReplicaReplay | None = None
        self._unclear: RunFinding | None = None
        self._is_over = False

    def on_start(self, start: RunStart) -> None:
        """Look before every update from here on.

        Raises:
            NotAvailable: ranks that do not step together.
        """
        self._engine: Engine = start.engine
        if not self._engine.driver.is_synchronous:
            raise NotAvailable(
                f"'{self._engine.plan}': ranks that do not step together hold no replicas; leave "
                "[recovery] check_replicas_every out"
            )
        self._last = marks_of(self._engine)
        self._replay = replica_replay(start, self._last)
        self._engine.before_update.append(self._before_update)

    def on_step(self, done: StepDone) -> None:
        """Note the parameters that the update has made. Where two replicas differ, replay."""
        if self._unclear is not None:
            self._end(self._explained(self._unclear))
        self._last = marks_of(self._engine)
        if self._replay is not None:
            self._replay.note(done.step, self._last)
            if (done.step + 1) % self._every == 0:
                self._replay.take(done.step)

    def on_rollback(self, step: int) -> None:
        """Note the parameters that were loaded."""
        self._last = marks_of(self._engine)
        self._changed.clear()
        if self._replay is not None:
            self._replay.begin(step, self._last)

    def _before_update(self, engine: Engine) -> None:
        if self._is_over:  # steps of a replay are not compared
            return
        now = marks_of(engine)
        before = self._last
        self._changed |= {key for key, mark in now.items() if before.get(key, mark) != mark}
        step = engine.step_index + 1
        if step % self._every:
            return
        report = ReplicaSums(now, frozenset(self._changed))
        told: list[ReplicaSums] = engine.world.axis("world").gather_objects(report)
        self._changed.clear()
        finding = damaged(told, step)
        if finding is None:
            if self._replay is not None:
                self._replay.confirm()
        elif finding.rank is None and self._replay is not None:
            self._unclear = finding  # after this step, as no replay can begin within one
        else:
            self._end(finding)

    def _end(self, finding: RunFinding) -> None:
        """End the run with a finding, on every rank."""
        if self._engine.world.rank == 0:
            self._report(finding)
        raise RunError(f"{finding.text()}; continue from a checkpoint that was saved before")

    def _explained(self, finding: RunFinding) -> RunFinding:
        """The finding with the word of a replay, where one can be made. Collective."""
        assert self._replay is not None
        self._is_over = True
        verdict = self._replay.judge()
        return finding if verdict is None else _with_verdict(finding, verdict)


def damaged(reports: list[ReplicaSums], step: int) -> RunFinding | None:
    """The finding for the first place whose replicas differ; None where all are equal."""
    places = dict.fromkeys(place for report in reports for place in report.marks)
    for place in places:
        marks = {rank: one.marks[place] for rank, one in enumerate(reports) if place in one.marks}
        if len(set(marks.values())) > 1:
            return _finding(place, marks, reports, step)
    return None


def _finding(
    place: Place, marks: Mapping[int, int], reports: list[ReplicaSums], step: int
) -> RunFinding:
    counts = Counter(marks.values())
    usual, most = counts.most_common(1)[0]
    changed = [rank for rank in marks if place in reports[rank].changed]
    odd = [rank for rank, value in marks.items() if value != usual]
    if len(changed) == 1:
        rank, how = changed[0], "they changed between two updates"
    elif most > len(marks) / 2:
        rank, how = odd[0], f"they differ from those of {most} other ranks"
    else:
        rank, how = None, f"the replicas of ranks {sorted(marks)} differ, and none is the odd one"
    cause = f"silent corruption: bits of its replica are wrong, as {how}"
    return RunFinding("corruption", rank, step, f"parameter {place[0]}", cause)


def _with_verdict(finding: RunFinding, verdict: Verdict) -> RunFinding:
    """A finding, with the rank and the step that a replay has told."""
    found = verdict.difference
    cause = f"silent corruption: bits of its replica are wrong, as {verdict.how}"
    if verdict.rank is None:
        cause = f"{finding.cause}; {verdict.how}"
    return replace(
        finding,
        rank=verdict.rank,
        step=found.step,
        where=f"parameter {found.place[0]}",
        cause=cause,
        details={**finding.details, "replayed_from": verdict.replayed_from},
    )
