"""Which parts of snapshots a run goes on from, by what its machines hold."""

from __future__ import annotations

import pytest

from plait.run.held_parts import (
    OWN,
    REPLICA,
    HeldPart,
    PartName,
    have_room,
    newest,
    next_start,
    partner_of,
)

FIRST = "00000001-aa"
SECOND = "00000002-bb"


def held(start: str, rank: int, step: int, kind: str = OWN, holder: int = 0) -> HeldPart:
    return HeldPart(PartName(start, 2, rank, step % 2, kind), step, 100, holder)


@pytest.mark.quick
def test_the_newest_step_that_every_rank_has_is_taken() -> None:
    parts = [held(FIRST, 0, 3), held(FIRST, 0, 4), held(FIRST, 1, 3), held(FIRST, 1, 2)]
    found = newest(parts)
    assert found is not None
    assert (found.start, found.step, found.source) == (FIRST, 3, "snapshot")


@pytest.mark.quick
def test_a_replica_stands_in_for_a_machine_that_is_lost() -> None:
    parts = [held(FIRST, 0, 3), held(FIRST, 1, 3, REPLICA), held(FIRST, 1, 2, REPLICA)]
    found = newest(parts)
    assert found is not None
    assert (found.step, found.source) == (3, "replica")
    assert newest([held(FIRST, 0, 3), held(FIRST, 1, 2, REPLICA)]) is None


@pytest.mark.quick
def test_parts_of_two_starts_are_never_mixed() -> None:
    """A machine that was cut off has parts of an earlier start, at the same step or a later one."""
    stale = [held(FIRST, 0, 7), held(FIRST, 1, 7)]
    assert newest([stale[0], held(SECOND, 1, 7)]) is None
    current = [held(SECOND, 0, 5), held(SECOND, 1, 5)]
    found = newest([*stale, *current])
    assert found is not None
    assert (found.start, found.step) == (SECOND, 5)
    assert newest([*stale, current[0]]) == newest(stale)


@pytest.mark.quick
def test_a_start_is_named_after_all_that_are_held() -> None:
    assert next_start([], "cc") == "00000001-cc"
    assert next_start([SECOND, FIRST], "cc") == "00000003-cc"
    name = PartName(SECOND, 2, 1, 0, REPLICA)
    assert PartName.of_text(name.as_text()) == name


@pytest.mark.quick
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aabbc", "abcd", "abbb"])
def test_a_replica_lies_on_another_machine(hosts: str) -> None:
    for rank, host in enumerate(hosts):
        partner = partner_of(rank, hosts)
        assert partner is not None
        assert hosts[partner] != host
    assert partner_of(0, "aa") is None


@pytest.mark.quick
def test_a_machine_needs_room_for_the_parts_that_it_lacks() -> None:
    """Of two machines with replicas none lacks a part; each of three lacks that of one."""
    own = [HeldPart(PartName(FIRST, 3, rank, 0, OWN), 4, 100, rank) for rank in range(3)]
    kept = [
        HeldPart(PartName(FIRST, 3, rank, 0, REPLICA), 4, 100, (rank + 1) % 3) for rank in range(3)
    ]
    found = newest([*own, *kept])
    assert found is not None
    assert [[copies[0].name.rank for copies in found.missing(host, "abc")] for host in "abc"] == [
        [1],
        [2],
        [0],
    ]
    assert have_room(found, "abc", [200, 200, None])
    assert not have_room(found, "abc", [200, 199, None])
    two = newest([held(FIRST, 0, 4), held(FIRST, 1, 4, REPLICA, 0), held(FIRST, 1, 4, OWN, 1)])
    assert two is not None
    assert have_room(two, "aa", [0, 0])
