"""The parts of snapshots that machines hold, and which of them a run goes on from.

A part is one rank's file. It lies on the machine of its rank, and as a replica on another one. Each
start of the run has a name of its own. So what an earlier start has left is never mixed with
another's. Pure: what all machines hold is data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OWN = "own"
REPLICA = "replica"
FETCHED = "fetched"
FIRST_START = 1


@dataclass(frozen=True)
class PartName:
    """The name of a file: the start of the run, its ranks, whose part it is, its turn, its kind."""

    start: str
    num_ranks: int
    rank: int
    turn: int
    kind: str

    def as_text(self) -> str:
        """The name as one word."""
        return f"{self.start}/{self.num_ranks}/{self.rank}/{self.turn}/{self.kind}"

    @staticmethod
    def of_text(text: str) -> PartName:
        """The name that was written as one word."""
        start, num_ranks, rank, turn, kind = text.split("/")
        return PartName(start, int(num_ranks), int(rank), int(turn), kind)


@dataclass(frozen=True)
class HeldPart:
    """A whole part: the step of its state, its bytes, and the rank whose machine holds it."""

    name: PartName
    step: int
    num_bytes: int
    holder: int


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot that is whole over all machines.

    Attributes:
        parts: by rank of the start that wrote it, every copy of its part.
    """

    start: str
    step: int
    parts: tuple[tuple[HeldPart, ...], ...]

    @property
    def source(self) -> str:
        """`replica` where a part is left on another machine alone, else `snapshot`."""
        own = [any(part.name.kind == OWN for part in copies) for copies in self.parts]
        return "snapshot" if all(own) else "replica"

    def missing(self, host: str, hosts: Sequence[str]) -> list[tuple[HeldPart, ...]]:
        """The parts of which a machine has no copy. `hosts` has a machine's name by rank."""
        by_holders = [({hosts[part.holder] for part in copies}, copies) for copies in self.parts]
        return [copies for holders, copies in by_holders if host not in holders]


def newest(held: Iterable[HeldPart]) -> HeldSnapshot | None:
    """The newest snapshot of the latest start that has a whole one; None for none."""
    by_start: dict[str, list[HeldPart]] = {}
    for part in held:
        by_start.setdefault(part.name.start, []).append(part)
    for start in sorted(by_start, reverse=True):
        found = _newest_of(start, by_start[start])
        if found is not None:
            return found
    return None


def _newest_of(start: str, held: Sequence[HeldPart]) -> HeldSnapshot | None:
    for step in sorted({part.step for part in held}, reverse=True):
        copies = [part for part in held if part.step == step]
        by_rank = defaultdict[int, list[HeldPart]](list)
        for part in copies:
            by_rank[part.name.rank].append(part)
        parts = tuple(tuple(by_rank[rank]) for rank in range(copies[0].name.num_ranks))
        if all(parts):
            return HeldSnapshot(start, step, parts)
    return None


def have_room(found: HeldSnapshot, hosts: Sequence[str], free_bytes: Sequence[int | None]) -> bool:
    """Whether each machine has memory for the parts that it lacks. By rank, its machine's name and
    free memory (None: unknown).

    A part that is on its way takes the memory of one more on each rank.
    """
    for host, room in zip(hosts, free_bytes, strict=True):
        sizes = [copies[0].num_bytes for copies in found.missing(host, hosts)]
        on_the_way = hosts.count(host) * max(sizes, default=0)
        if room is not None and sum(sizes) + on_the_way > room:
            return False
    return True


def next_start(held: Iterable[str], token: str) -> str:
    """The name of a new start, after all those that are held anywhere."""
    numbers = [int(start.partition("-")[0]) for start in held]
    return f"{max(numbers, default=FIRST_START - 1) + 1:08d}-{token}"


def partner_of(rank: int, hosts: Sequence[str]) -> int | None:
    """The rank on the next machine that keeps a replica of a rank's part; None on one machine.

    >>> [partner_of(rank, "aabbc") for rank in range(5)]
    [2, 3, 4, 4, 0]
    >>> partner_of(0, "aa") is None
    True
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    own = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    following = names[(names.index(hosts[rank]) + 1) % len(names)]
    theirs = [other for other, host in enumerate(hosts) if host == following]
    return theirs[own.index(rank) % len(theirs)]
