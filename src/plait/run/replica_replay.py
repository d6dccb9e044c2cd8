"""A replay of the steps since replicas were last equal: it says whose update was wrong.

Of two replicas that differ none is the odd one. A bit that an update itself gets wrong changes
nothing between two updates either. So each rank keeps the last state whose replicas were equal, and
the marks of every update since. The steps are done again from there. A rank whose marks are others
this time was wrong the first time. A state lies in its rank's own machine; other machines are sent
it when a replay begins, and not before.
"""

from __future__ import annotations

import socket
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.checkpoint.memory import MemoryCopy
from plait.doctor.flight import Phase
from plait.launcher.board import Files
from plait.launcher.leftovers import namespace
from plait.run.bit_sums import Marks, Place, marks_of
from plait.run.copier import Copier
from plait.run.memory import free_memory_bytes

if TYPE_CHECKING:
    from plait.comm import World
    from plait.run.hooks import RunStart

TWO = 2
BLOCK_BYTES = 64 << 20


@dataclass
class MarksByStep:
    """The marks that one rank had after each step, from that of the kept state on."""

    places: tuple[Place, ...]
    steps: dict[int, array[int]] = field(default_factory=dict)

    def note(self, step: int, marks: Marks) -> None:
        """Note the marks after a step."""
        self.steps[step] = self.in_order(marks)

    def in_order(self, marks: Marks) -> array[int]:
        """The marks in the order of the places; 0 where a place has no memory now."""
        return array("q", [marks.get(place, 0) for place in self.places])


@dataclass(frozen=True)
class FirstDifference:
    """The first step whose update left replicas of a place different, and who holds these."""

    step: int
    place: Place
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """The word of a replay: the rank whose update was wrong (None: unknown), and how it shows."""

    difference: FirstDifference
    rank: int | None
    how: str
    replayed_from: int


class ReplicaReplay:
    """Keeps what a replay needs, in host memory: two states of this rank, which take turns."""

    def __init__(self, start: RunStart, marks: Marks, machines: Sequence[str]) -> None:
        """Keep the state that the run starts from. `machines` has a name by rank. Collective."""
        from plait.engine.state.snapshots import Snapshots

        self._engine = start.engine
        self._loader = start.loader
        self._machines = machines
        self._files = Files(Path(tempfile.gettempdir()))
        weakref.finalize(self, self._files.close)
        own = tuple(self._files.make() for _ in range(TWO))
        self._paths: list[tuple[Path, ...]] = start.engine.world.axis("world").gather_objects(own)
        self._snapshots = Snapshots(own, start.engine)
        self._copier = Copier()
        self._turn = 0
        self._kept = start.first_step - 1
        self._taken: int | None = None
        self._history = MarksByStep(tuple(marks))
        self.begin(self._kept, marks)

    def begin(self, step: int, marks: Marks) -> None:
        """Keep the present state, of this step, as one whose replicas are equal."""
        self._copier.wait()
        self._history.steps.clear()
        self._history.note(step, marks)
        self.take(step)
        self._copier.wait()
        self.confirm()

    def note(self, step: int, marks: Marks) -> None:
        """Note the marks that the update of a step has made."""
        self._history.note(step, marks)

    def take(self, step: int) -> None:
        """Copy the state of a step beside the next one, where the older of two was."""
        self._copier.wait()
        self._taken = step
        meta = {"loader": self._loader.state_dict()}
        self._copier.begin(self._snapshots.begin(self._turn + 1, meta))
        self._engine.copies.add(self._wait)

    def confirm(self) -> None:
        """The replicas of the state that was taken last were found to be equal."""
        if self._taken is None:
            return
        self._turn += 1
        self._kept = self._taken
        self._taken = None
        for step in [one for one in self._history.steps if one < self._kept]:
            del self._history.steps[step]

    def judge(self) -> Verdict | None:
        """Do the steps again, up to the first that left replicas different; None where that cannot
        be. Collective.

        The engine's state is that of this step afterwards.
        """
        world = self._engine.world.axis("world")
        histories: list[MarksByStep] = world.gather_objects(self._history)
        found = first_difference(histories)
        if found is None or found.step <= self._kept:
            return None
        paths = self._paths_here()
        if not paths:
            return None
        odd: list[bool] = world.gather_objects(self._is_other_now(found.step, paths))
        return judged(found, odd, self._kept)

    def _is_other_now(self, last: int, paths: Sequence[Path]) -> bool:
        """Whether this rank's updates up to a step have other marks than the first time.

        `paths` has a file of the kept state by rank.
        """
        from plait.engine.state.snapshots import restore

        engine = self._engine
        with engine.world.recorder.flight.during(Phase.STARTING):
            meta = restore(engine, paths)
        self._loader.load_state_dict(meta["loader"], self._kept)
        engine.guard.rolled_back(self._kept)
        batches = iter(self._loader)
        is_other = False
        for step in range(self._kept + 1, last + 1):
            engine.step(next(batches))
            now = self._history.in_order(marks_of(engine))
            is_other |= now != self._history.steps[step]
        return is_other

    def _paths_here(self) -> list[Path]:
        """By rank, a file of the kept state on this machine. Collective.

        The first rank of a machine keeps what the ranks of others send. Empty where a machine
        has no memory for it.
        """
        paths = [of_rank[self._turn % TWO] for of_rank in self._paths]
        machines = self._machines
        if len(set(machines)) == 1:
            return paths
        world = self._engine.world
        here = machines[world.rank]
        first = machines.index(here)
        content = self._snapshots.content(self._turn)
        facts = world.axis("world").gather_objects((content.numel(), free_memory_bytes()))
        sizes: list[int] = [size for size, _ in facts]
        if not have_room(machines, sizes, [free for _, free in facts]):
            return []
        come = {}
        for rank, size in enumerate(sizes):
            is_own = rank == world.rank
            sent = content if is_own else torch.empty(size, dtype=torch.uint8)
            _send_to_all(world, sent, rank)
            if world.rank == first and machines[rank] != here:
                come[rank] = self._files.make()
                MemoryCopy(come[rank]).write(sent)
        brought: dict[int, Path] = world.axis("world").gather_objects(come)[first]
        return [brought.get(rank, path) for rank, path in enumerate(paths)]

    def _wait(self) -> None:
        self._copier.wait()


def have_room(machines: Sequence[str], sizes: Sequence[int], free: Sequence[int | None]) -> bool:
    """Whether each machine has room for the parts of the others. All in bytes, by rank.

    A part that is on its way takes the memory of one more on each rank. None: unknown.
    """
    for name, room in zip(machines, free, strict=True):
        others = sum(size for size, other in zip(sizes, machines, strict=True) if other != name)
        if room is not None and others + machines.count(name) * max(sizes) > room:
            return False
    return True


def _send_to_all(world: World, content: Tensor, root: int) -> None:
    """Have the bytes (num_bytes,) uint8 of a rank on every rank, in place, in blocks."""
    for block in content.split(BLOCK_BYTES):
        sent = block.to(world.device)
        world.axis("world").broadcast(sent, root).wait()
        if world.rank != root:
            block.copy_(sent)


def machine() -> str:
    """The name of this machine, and of the processes that its ranks see."""
    return f"{socket.gethostname()}/{namespace()}"


def replica_replay(start: RunStart, marks: Marks) -> ReplicaReplay | None:
    """The states for a replay, where one may be needed and can be made. Collective.

    That is where two ranks hold the same elements, and the loader can go back.
    """
    able = hasattr(start.loader, "state_dict") and hasattr(start.loader, "load_state_dict")
    told = start.engine.world.axis("world").gather_objects((tuple(marks), able, machine()))
    holders = Counter(place for places, _, _ in told for place in places)
    if not all(is_able for _, is_able, _ in told) or TWO not in holders.values():
        return None
    return ReplicaReplay(start, marks, [name for _, _, name in told])


def first_difference(histories: Sequence[MarksByStep]) -> FirstDifference | None:
    """The first step after which two ranks' marks of the same place differ."""
    indices = [{place: i for i, place in enumerate(one.places)} for one in histories]
    places = dict.fromkeys(place for history in histories for place in history.places)
    for step in sorted(set.intersection(*(set(history.steps) for history in histories))):
        for place in places:
            ranks = [rank for rank, known in enumerate(indices) if place in known]
            marks = {histories[rank].steps[step][indices[rank][place]] for rank in ranks}
            if len(marks) > 1:
                return FirstDifference(step, place, tuple(ranks))
    return None


def judged(found: FirstDifference, odd: Sequence[bool], kept: int) -> Verdict:
    """The verdict, by whose marks were others in the replay from the step `kept`."""
    others = [rank for rank in found.ranks if odd[rank]]
    replay = f"a replay of its update from step {kept}"
    if len(others) == 1:
        steady = [rank for rank in found.ranks if rank not in others]
        how = f"{replay} gives other bits, and that of ranks {steady} the same again"
        return Verdict(found, others[0], how, kept)
    how = "gives the same bits again on each of them: the fault is lasting"
    if others:
        how = "gives other bits on more than one: set train.deterministic to tell them apart"
    return Verdict(found, None, f"a replay from step {kept} {how}", kept)
