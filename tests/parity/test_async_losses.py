"""Workers of the asynchronous server that die, lose their connection, rest and come back: others go
on, the record replays.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from plait.comm import World
from plait.engine.build import Options, build
from plait.models import losses
from plait.outer import AsyncServerDriver
from plait.verify.record.compare import largest, relative_error
from tests.parity.families import FAMILIES
from tests.parity.harness import SEED, TOLERANCE
from tests.parity.replay import Recorded, replay
from tests.parity.test_async_server import sgd, shares

Run = Callable[..., list[Any]]
STEPS = 6
LIMIT_SECONDS = 60.0
DIES = 2
BREAKS = 1  # ranks
BEFORE = 3  # steps that a rank makes before that happens to it


def train(world: World, plan: str, num_applied: int, event: str) -> Any:
    """Rank 0 serves all keys; what it holds once `num_applied` gradients have come, its record, and
    every rank's staleness.
    """
    rank = world.rank
    options = Options(seed=SEED, num_servers=1)
    engine = build(
        FAMILIES["mlp"].model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=sgd,
        options=options,
        world=world,
    )
    driver = engine.driver
    assert isinstance(driver, AsyncServerDriver)
    if driver.server is not None:
        driver.server.log = []
    world.axis("dp").barrier()
    ages = []
    for step, batch in enumerate(shares(FAMILIES["mlp"], world.size)[rank]):
        if step == BEFORE and event == "dies" and rank == DIES:
            os._exit(1)
        if step == BEFORE and event == "breaks" and rank == BREAKS:
            driver._lines[0]._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        if step == BEFORE + 1 and event == "breaks" and rank == BREAKS:
            driver.leave()
        ages.append(engine.step(batch, trace=False).details["staleness"])
    driver.leave()
    if driver.server is None:
        return ages, None, None
    deadline = time.monotonic() + LIMIT_SECONDS
    server = driver.server
    while sum(server.histogram.values()) < num_applied or any(
        map(server.versions.holds, range(world.size))
    ):
        assert time.monotonic() < deadline, server.histogram
        time.sleep(0.01)
    weights = {piece.name: piece.value.detach().clone() for piece in engine.strategy.pieces}
    record = Recorded(tuple(weights), tuple(driver.server.log or ()))
    return ages, record, weights


def check(results: list[Any], size: int) -> None:
    _, record, weights = results[0]
    expected = replay(FAMILIES["mlp"], shares(FAMILIES["mlp"], size), [record], sgd)
    for name, value in expected.items():
        assert (
            relative_error(weights[name].view_as(value), value, largest(expected)) <= TOLERANCE
        ), name


def leave_early(world: World, plan: str, num_applied: int, event: str) -> Any:
    result = train(world, plan, num_applied, event)
    world.close(together=False)  # there is one that will never come
    return result


def test_a_worker_that_dies_holds_nobody_up_and_what_it_gave_stays(ranks: Run) -> None:
    plan = "dp3:async-server,stale1 precision:float64"
    applied = 2 * STEPS + BEFORE
    results = ranks(3, leave_early, plan, applied, "dies", plan=plan, may_die={DIES})
    assert results[DIES] is None and len(results[1][0]) == STEPS
    record = results[0][1]
    assert sum(push.worker == DIES for update in record.log for push in update.pushes) == BEFORE
    check(results, 3)


def test_a_broken_connection_costs_one_gradient_and_the_worker_is_in_again(ranks: Run) -> None:
    plan = "dp2:async-server,stale4 precision:float64"
    applied = 2 * STEPS - 1
    results = ranks(2, train, plan, applied, "breaks", plan=plan)
    ages = results[BREAKS][0]
    assert [age < 0 for age in ages] == [step == BEFORE for step in range(STEPS)]
    check(results, 2)
    assert all(torch.isfinite(value).all() for value in results[0][2].values())
