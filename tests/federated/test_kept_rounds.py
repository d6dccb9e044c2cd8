"""Rounds that lose something: a client without a sum, or the process itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plait.comm import World
from plait.outer.federated.messages import Reply, TrainTask
from plait.outer.federated.simulation import LocalFleet, make_server
from plait.plan import Plan
from tests.federated.test_simulation import config

Run = Callable[..., list[Any]]


def one_explodes(world: World) -> tuple[Any, bool]:
    settings = config("federated.secure=true", "federated.local_epochs=1")
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    run = fleet.client.run

    def grown(task: TrainTask, samples: Any, *given: Any) -> Reply:
        reply = run(task, samples, *given)
        return replace(reply, change=reply.change * 1e30) if samples.client == 2 else reply

    fleet.client.run = grown  # type: ignore[method-assign]
    server = make_server(settings, fleet.initial())
    done = server.round(fleet, 1)
    return done, bool(server.weights.abs().max() < 10)


def test_a_secret_sum_leaves_out_what_has_no_sum(ranks: Run) -> None:
    done, near = ranks(1, one_explodes)[0]
    assert done.answered == (0, 1, 3) and near
