"""Rounds that lose something: a client without a sum, or the process itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.comm import World
from plait.outer.federated.messages import Reply, TrainTask
from plait.outer.federated.rounds import Round
from plait.outer.federated.simulation import LocalFleet, ServerData, make_server, simulate
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


def test_an_interrupted_simulation_keeps_its_rounds(tmp_path: Path) -> None:
    out = tmp_path / "rounds.json"

    def interrupt(done: Round) -> None:
        if done.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(config("federated.rounds=3", plan="dp1"), interrupt, out=out)
    kept = json.loads(out.read_text())
    assert [done["round"] for done in kept["rounds"]] == [1, 2]
    assert kept["accuracy"] == kept["rounds"][1]["accuracy"]
    result = simulate(config(plan="dp1"), lambda done: None, out=out)
    assert json.loads(out.read_text()) == result and [*tmp_path.iterdir()] == [out]


def test_the_weights_of_a_simulation_have_its_accuracy(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    settings = config(plan="dp1")
    result = simulate(settings, lambda done: None, weights=path)
    values = load_file(path)
    flat = torch.cat([values[name].reshape(-1) for name in sorted(values)])
    server = ServerData(settings)
    assert [*server.evaluator.named(flat)] == sorted(values)
    assert server.accuracy(flat) == result["accuracy"]
    assert server.accuracy(server.evaluator.initial()) != result["accuracy"]
