"""A flight record as a reader sees it: what a rank does, whom it waits for, what its steps took."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from plait.doctor import process
from plait.doctor.flight import (
    ACTION,
    ACTION_AT,
    COMPILING_AT,
    ENTRIES_AT,
    ENTRY,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_AT,
    MAGIC,
    MOVED,
    MOVED_AT,
    NUM_ENTRIES,
    NUM_STEPS,
    PHASE,
    PHASE_AT,
    POINT_TO_POINT,
    RECORD_BYTES,
    STEP,
    STEPS_AT,
    WAIT,
    WAIT_AT,
    FlightRecorder,
    Phase,
    WaitState,
    names_path,
)
from plait.values import JsonMapping, JsonObject


@dataclass(frozen=True)
class Communication:
    """One communication: the `number`-th of its axis, or of its pair of ranks.

    Times are of the clock that all processes of a host share, 0 for what has not happened.
    """

    axis: str
    op: str
    ranks: tuple[int, ...]
    number: int
    bytes: int
    peer: int
    issued: float
    waited: float = 0.0
    ended: float = 0.0

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of the axis take part."""
        return self.op not in POINT_TO_POINT

    def text(self) -> str:
        """`all_reduce on axis dp (its operation 57)`."""
        return f"{self.op} on axis {self.axis} (its operation {self.number})"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of one rank, and its page faults.

    `load` is loading, `wait` waiting for others, `issue` handing over to the transport. `processor`
    is the processor time of the step itself, on all threads.
    """

    step: int
    ended: float
    seconds: float
    load: float
    wait: float
    issue: float
    minor_faults: float
    major_faults: float
    processor: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that the rank took for itself, loading left out."""
        return max(0.0, self.seconds - self.load - self.wait - self.issue)


@dataclass
class RankSnapshot:
    """One rank at one moment; steps and communications are read when they are asked for."""

    rank: int
    size: int
    pid: int
    start: int
    heartbeat: float
    moved: float
    phase: Phase
    phase_since: float
    action: str
    action_since: float
    compiling: bool
    state: WaitState
    current: Communication | None
    equals: tuple[int, ...] = ()
    host: str = ""
    data: bytes = field(default=b"", repr=False)
    names: Sequence[JsonMapping] = field(default=(), repr=False)

    @cached_property
    def steps(self) -> tuple[StepTimes, ...]:
        """The last steps, oldest first."""
        return tuple(_steps(self.data)) if self.data else ()

    @cached_property
    def entries(self) -> tuple[Communication, ...]:
        """The last communications, oldest first."""
        return tuple(_entries(self.data, self.names)) if self.data else ()

    @property
    def last_step(self) -> int:
        """The number of the last step that is done; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def waits(self) -> bool:
        """Whether it is in a communication."""
        return self.state is not WaitState.NONE and self.current is not None

    def process_state(self) -> str:
        """The letter of its process; empty when that is gone."""
        return process.state(self.pid, self.start)

    def doing(self) -> str:
        """The present work, in words."""
        if self.waits and self.current is not None:
            return self.current.text()
        if self.phase is Phase.STEPPING:
            return f"action {self.action}" if self.action else "a step"
        return PHASES[self.phase]


PHASES = {
    Phase.STARTING: "starting",
    Phase.OUTSIDE: "between two steps",
    Phase.LOADING: "loading the batch",
    Phase.STEPPING: "a step",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving",
    Phase.ENDING: "ending the run",
    Phase.DONE: "done",
    Phase.MEETING: "meeting the other ranks anew",
}


def view_of(
    data: bytes, names: Sequence[JsonMapping], about: JsonMapping | None = None
) -> RankSnapshot:
    """The record in these bytes. Raises `ValueError` for what is no record."""
    magic, pid, start, rank, size = HEADER.unpack_from(data, 0)
    if len(data) < RECORD_BYTES or magic != MAGIC:
        raise ValueError("this is no flight record")
    # A writer that has lost its processor may leave zeros for a while: what it writes is now.
    moved = MOVED.unpack_from(data, MOVED_AT)[0] or now()
    heartbeat = HEARTBEAT.unpack_from(data, HEARTBEAT_AT)[0] or now()
    phase, _, phase_since, _ = PHASE.unpack_from(data, PHASE_AT)
    action, _, action_since = ACTION.unpack_from(data, ACTION_AT)
    state, name, number, num_bytes, peer, since, _ = WAIT.unpack_from(data, WAIT_AT)
    current = None
    if state:
        current = _communication(names, name, (number, num_bytes, peer), (since, since, 0.0))
    return RankSnapshot(
        rank=rank,
        size=size,
        pid=pid,
        start=start,
        heartbeat=heartbeat,
        moved=moved,
        phase=Phase(phase),
        phase_since=phase_since,
        action=str(_about(names, action).get("action", "")),
        action_since=action_since,
        compiling=struct.unpack_from("<I", data, COMPILING_AT)[0] > 0,
        state=WaitState(state),
        current=current,
        equals=tuple((about or {}).get("equals", ())),
        host=str((about or {}).get("host", "")),
        data=data,
        names=names,
    )


def own_view(recorder: FlightRecorder) -> RankSnapshot:
    """The record of this process."""
    return view_of(recorder.view(), recorder.names)


def _about(names: Sequence[JsonMapping], name: int) -> JsonMapping:
    return names[name - 1] if 0 < name <= len(names) else {}


def _communication(
    names: Sequence[JsonMapping],
    name: int,
    numbers: tuple[int, int, int],
    times: tuple[float, float, float],
) -> Communication | None:
    about = _about(names, name)
    if "op" not in about:
        return None
    ranks = tuple(about["ranks"])
    return Communication(about["axis"], about["op"], ranks, *numbers, *times)


def _steps(data: bytes) -> list[StepTimes]:
    num_steps = PHASE.unpack_from(data, PHASE_AT)[3]
    found = []
    for index in range(max(0, num_steps - NUM_STEPS), num_steps):
        at = STEPS_AT + index % NUM_STEPS * STEP.size
        found.append(StepTimes(*STEP.unpack_from(data, at)))
    return found


def _entries(data: bytes, names: Sequence[JsonMapping]) -> list[Communication]:
    num_entries = MOVED.unpack_from(data, MOVED_AT)[1]
    entries = []
    for entry in range(max(0, num_entries - NUM_ENTRIES), num_entries):
        at = ENTRIES_AT + entry % NUM_ENTRIES * ENTRY.size
        index, name, _, number, num_bytes, peer, *times = ENTRY.unpack_from(data, at)
        if index != entry + 1:
            continue
        one = _communication(names, name, (number, num_bytes, peer), (times[0], times[1], times[2]))
        if one is not None:
            entries.append(one)
    return entries


class Records:
    """The records of all ranks in a folder; names are read on as they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[Path, tuple[int, list[JsonObject], JsonObject]] = {}

    def views(self) -> dict[int, RankSnapshot]:
        """The view of each rank now, by rank; a rank without a record that can be read is left
        out.
        """
        found = {}
        for path in sorted(self.folder.glob("rank-*.flight")):
            view = self._view(path)
            if view is not None:
                found[view.rank] = view
        return found

    def _view(self, path: Path) -> RankSnapshot | None:
        try:
            rank = int(path.stem.removeprefix("rank-"))
            data = path.read_bytes()
            return view_of(data, *self._names_of(names_path(self.folder, rank)))
        except (OSError, ValueError, struct.error, KeyError, TypeError):
            return None

    def _names_of(self, path: Path) -> tuple[list[JsonObject], JsonObject]:
        size = path.stat().st_size
        known = self._names.get(path)
        if known is None or known[0] != size:
            known = (size, *_names(path))
            self._names[path] = known
        return known[1], known[2]


def _names(path: Path) -> tuple[list[JsonObject], JsonObject]:
    first, *lines = path.read_text().splitlines() or ["{}"]
    names = []
    for line in lines:
        try:
            names.append(json.loads(line))
        except ValueError:  # the last line, half written
            break
    return names, dict(json.loads(first))


def now() -> float:
    """The clock of the records."""
    return time.perf_counter()
