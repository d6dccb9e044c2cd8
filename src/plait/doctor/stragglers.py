"""Stragglers: a rank that takes longer than its equals for its own work, step after step.

A collective ends for all at once, so the slow rank is the one that waits least. What it takes for
itself is compared with that of ranks that do the same work, by medians. Time in which its threads
were ready and had no processor is no fault of the rank. More processor time than that of its equals
is: others cannot take it away.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plait.doctor import process
from plait.doctor.findings import RunFinding
from plait.doctor.record import RankSnapshot, StepTimes, now

STEPS: Final = 12
LEAST_SHARE: Final = 0.15  # of a step, that the others would be quicker
LEAST_FACTOR: Final = 1.4
LEAST_SECONDS: Final = 0.002
WINDOW_SECONDS: Final = 2.0
LOOKS_KEPT: Final = 256
MOST_STEPS_OK: Final = 0.25  # of the steps looked at may be as quick as the others'
MEMORY_FAULTS_A_SECOND: Final = 20_000  # page faults, of 4 KiB each and a microsecond or more
MAJOR_FAULTS_A_SECOND: Final = 20
NAMES: Final = {
    "computing": "computing: its own work takes longer than that of its equals",
    "loader": "loader: its batches come later than those of its equals",
    "link": "link: it takes longer than its equals to hand over what it sends",
    "memory": "memory: its pages are brought in again, step after step",
}


@dataclass(frozen=True)
class _Part:
    """A part of the steps of a rank: the excess over its equals, in seconds a step."""

    name: str
    own: float
    others: float
    steady: bool

    @property
    def excess(self) -> float:
        return self.own - self.others


class Stragglers:
    """Looks at the records every few seconds; each rank and cause is reported once."""

    def __init__(self) -> None:
        self._told: set[tuple[int, str]] = set()
        self._looked = 0.0
        self._delays: dict[int, deque[tuple[float, float]]] = {}

    def look(self, views: Mapping[int, RankSnapshot]) -> list[RunFinding]:
        """The stragglers that are new."""
        moment = now()
        if moment - self._looked < WINDOW_SECONDS or len(views) < 2:
            return []
        self._looked = moment
        shares: dict[int, float] = {}
        for rank, view in views.items():
            seen = self._delays.setdefault(rank, deque(maxlen=LOOKS_KEPT))
            seen.append((moment, process.delay_seconds(view.pid)))
            share = delay_share(seen, view)
            if share is not None:
                shares[rank] = share
        most = max(shares.values(), default=0.0)
        found = [
            slowness(view, views, shares[rank], most)
            for rank, view in views.items()
            if rank in shares
        ]
        new = []
        for finding in found:
            if finding is None or finding.rank is None:
                continue
            mark = (finding.rank, finding.cause.partition(":")[0])
            if mark not in self._told:
                self._told.add(mark)
                new.append(finding)
        return new


def delay_share(seen: Sequence[tuple[float, float]], view: RankSnapshot) -> float | None:
    """The part of the time of a rank's last steps in which its threads had no processor.

    `seen` are moments, and the delay until each. None where none is as old as these steps.
    """
    steps = view.steps[-STEPS:]
    if not steps:
        return None
    began = steps[0].ended - steps[0].seconds
    older = [one for one in seen if one[0] <= began]
    if not older:
        return None
    (first, before), (last, after) = older[-1], seen[-1]
    return max(0.0, after - before) / (last - first)


def slowness(
    view: RankSnapshot,
    views: Mapping[int, RankSnapshot],
    own_share: float = 0.0,
    most_share: float = 0.0,
) -> RunFinding | None:
    """The finding for a rank that is slower than its equals; None for one that is not.

    `own_share` is the part of the time in which its threads had no processor. `most_share` is the
    largest of all ranks: who hands over also waits for the memory of who takes.
    """
    equals = [rank for rank in view.equals if rank in views and rank != view.rank]
    others = [views[rank] for rank in equals]
    own_steps = view.steps[-STEPS:]
    theirs = [one.steps[-STEPS:] for one in others]
    if len(own_steps) < STEPS or not theirs or min(map(len, theirs)) < STEPS:
        return None
    length = statistics.median(step.seconds for step in own_steps)
    parts = [_part(name, own_steps, theirs) for name in ("computing", "loader", "link")]
    worst = max(parts, key=lambda part: part.excess)
    worked = _part("processor", own_steps, theirs)
    works_more = worst.name == "computing" and is_slow(worked, worked.own)
    share = most_share if worst.name == "link" else own_share
    missing = 0.0 if works_more else share * length
    if not is_slow(worst, length, missing):
        return None
    cause = "memory" if worst.name == "computing" and _pages(own_steps, theirs) else worst.name
    figures = f"{worst.own * 1e3:.1f} ms a step against {worst.others * 1e3:.1f} ms"
    where = {"loader": "loading the batch", "link": "communication"}.get(cause, "its actions")
    return RunFinding(
        "straggler",
        view.rank,
        view.last_step,
        where,
        f"{NAMES[cause]} ({figures})",
        details={"seconds_a_step": worst.own, "seconds_of_equals": worst.others},
    )


def is_slow(part: _Part, length: float, missing: float = 0.0) -> bool:
    """Whether a part of a step is slow. `missing` seconds of it had no processor."""
    least = max(LEAST_SECONDS, LEAST_SHARE * length)
    much = part.own >= LEAST_FACTOR * part.others
    return part.steady and much and part.excess - missing >= least


def _part(name: str, mine: Sequence[StepTimes], theirs: Sequence[Sequence[StepTimes]]) -> _Part:
    own = [_seconds(name, step) for step in mine]
    middles = [statistics.median(_seconds(name, step) for step in steps) for steps in theirs]
    others = statistics.median(middles)
    quick = sum(one < LEAST_FACTOR * others for one in own)
    return _Part(name, statistics.median(own), others, quick <= MOST_STEPS_OK * len(own))


def _seconds(name: str, step: StepTimes) -> float:
    return {
        "computing": step.own,
        "loader": step.load,
        "link": step.issue,
        "processor": step.processor,
    }[name]


def _pages(mine: Sequence[StepTimes], theirs: Sequence[Sequence[StepTimes]]) -> bool:
    """Whether the rank brings in far more pages than its equals."""
    own = _faults(mine)
    others = [_faults(steps) for steps in theirs]
    minor = own[0] - max(one[0] for one in others)
    major = own[1] - max(one[1] for one in others)
    return minor > MEMORY_FAULTS_A_SECOND or major > MAJOR_FAULTS_A_SECOND


def _faults(steps: Sequence[StepTimes]) -> tuple[float, float]:
    """Minor and major page faults a second."""
    seconds = sum(step.seconds for step in steps) or 1.0
    minor = sum(step.minor_faults for step in steps) / seconds
    return minor, sum(step.major_faults for step in steps) / seconds
