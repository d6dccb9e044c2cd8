"""The rule of bounded staleness, as properties over every order in which workers may come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.outer.async_server.staleness import Applied, Pushed, Versions

orders = st.lists(st.integers(0, 4), max_size=60)


def run(num_workers: int, bound: int, order: list[int]) -> tuple[Versions, list[Applied]]:
    """Workers push in the order that is given; one whose gradient waits cannot."""
    versions = Versions(range(num_workers), bound)
    applied = []
    steps = [0] * num_workers
    waiting: set[int] = set()
    for worker in (w % num_workers for w in order):
        if worker not in waiting:
            waiting.add(worker)
            update = versions.push(worker, steps[worker])
            steps[worker] += 1
            if update is not None:
                applied.append(update)
                waiting -= {push.worker for push in update.pushes}
    return versions, applied


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 6), orders)
def test_no_gradient_is_older_than_the_bound(
    num_workers: int, bound: int, order: list[int]
) -> None:
    _, applied = run(num_workers, bound, order)
    assert all(0 <= age <= bound for update in applied for age in update.staleness)
    assert [update.version for update in applied] == list(range(1, len(applied) + 1))


@settings(deadline=None)
@given(st.integers(1, 5), orders)
def test_a_bound_of_zero_is_lock_step(num_workers: int, order: list[int]) -> None:
    _, applied = run(num_workers, 0, order)
    for number, update in enumerate(applied):
        assert [push.worker for push in update.pushes] == list(range(num_workers))
        assert {(push.step, push.base) for push in update.pushes} == {(number, number)}


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 6), orders)
def test_who_is_waited_for_computes(num_workers: int, bound: int, order: list[int]) -> None:
    """So there is no deadlock: when all have pushed, all has been applied."""
    versions, _ = run(num_workers, bound, order)
    for worker in list(versions.holding_up):
        versions.push(worker, 99)
    assert not versions.holding_up and not versions._waiting


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 6), orders, st.integers(0, 4))
def test_nobody_waits_for_who_has_left(
    num_workers: int, bound: int, order: list[int], leaver: int
) -> None:
    versions, _ = run(num_workers, bound, order)
    versions.leave(leaver % num_workers)
    assert leaver % num_workers not in versions.holding_up
    assert versions.join(leaver % num_workers) == versions.version


def test_what_waited_together_is_applied_together() -> None:
    versions = Versions(range(3), 1)
    assert versions.push(0, 0) == Applied(1, (Pushed(0, 0, 0),))
    assert versions.push(1, 0) is None  # worker 2 would be left two updates behind
    assert versions.holding_up == [2]
    last = versions.push(2, 0)
    assert last == Applied(2, (Pushed(1, 0, 0), Pushed(2, 0, 0)))
    assert last.staleness == (1, 1)


def test_a_gradient_without_weights_is_refused() -> None:
    versions = Versions(range(2), 1)
    versions.leave(1)
    with pytest.raises(ValueError, match="worker 1"):
        versions.push(1, 0)
