"""Pipelines by their accounts: activations and versions held, bytes sent, memory; what is refused;
a rank that dies.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.errors import ModelError, NotAvailable, PlanError, RankFailed, ScheduleError
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.actions import Kind
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import simulate
from plait.verify.probes import PROBES
from plait.verify.run import VerifyTask, in_world
from tests.parity import families
from tests.parity.verify_problems import problem

Run = Callable[..., list[Any]]
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if not family.facts.asynchronous]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def make_engine(
    world: World, plan: str, model: nn.Module | None = None, cutting: Cutting | None = None
) -> Any:
    model = families.family_of("mlp-deep").model() if model is None else model
    return build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=sgd,
        options=Options(cutting=cutting or Cutting()),
        world=world,
    )


def batch(num_samples: int = 16, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, width, generator=generator)
    return inputs, torch.randint(0, 5, (num_samples,), generator=generator)


def measured(world: World, plan: str) -> dict[str, Any]:
    engine = make_engine(world, plan)
    for _ in range(2):
        result = engine.step(batch())
    spans = [span.name for span in result.timeline.spans if span.kind in ("F", "B", "I", "W")]
    live = {stage: part.stage.peak_live for stage, part in engine.pipeline.parts.items()}
    transport = engine.pipeline.transport
    return {
        "spans": spans,
        "live": live,
        "forms": transport.num_forms_sent,
        "sent": result.ledger.bytes("pp", "send"),
    }


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_run_holds_what_its_schedule_promises(ranks: Run, schedule: str) -> None:
    """p = 4, m = 8: the live activations of each stage as simulated, and the actions in the order
    of the list.
    """
    found = ranks(4, measured, f"pp4:{schedule} mb8", plan=f"pp4:{schedule} mb8")
    virtual = 2 if schedule == "interleaved" else 1
    expected = make(schedule, 4, 8, virtual)
    assert [rank["spans"] for rank in found] == [
        [str(action) for action in actions] for actions in expected.ranks
    ]
    live = {stage: peak for rank in found for stage, peak in rank["live"].items()}
    assert tuple(live[stage] for stage in sorted(live)) == simulate(expected).peak_activations
    if schedule == "gpipe":
        assert list(live.values()) == [8, 8, 8, 8]
    if schedule == "1f1b":
        assert list(live.values()) == [4, 3, 2, 1]


def test_shapes_are_agreed_once(ranks: Run) -> None:
    found = ranks(4, measured, "pp4:1f1b mb8", plan="pp4")
    assert [rank["forms"] for rank in found] == [1, 1, 1, 0]
    tensor_bytes = 2 * 11 * 4  # two samples of the hidden size, float32
    assert found[1]["sent"] == 8 * 2 * tensor_bytes


def varying(world: World) -> tuple[list[float], int]:
    engine = make_engine(world, "pp2:1f1b mb2")
    losses = [engine.step(batch(size), trace=False).loss for size in (16, 6, 16, 7)]
    return losses, engine.pipeline.transport.num_forms_sent


def test_shapes_may_vary(ranks: Run) -> None:
    """Batches of 16, 6, 16 and 7 in two: micro-batches of 8, 3, and 4 with 3."""
    (losses, forms), (others, _) = ranks(2, varying, plan="pp2")
    assert losses == others
    assert forms == 3


def held(world: World, plan: str) -> tuple[int, int]:
    engine = make_engine(world, plan)
    whole = sum(param.numel() for param in engine.model.parameters()) * 4
    return engine.memory()["parameters"], whole


def test_only_the_own_stage_has_memory(ranks: Run) -> None:
    found = ranks(4, held, "pp4:1f1b mb4", plan="pp4")
    assert sum(own for own, _ in found) == found[0][1]
    assert max(own for own, _ in found) < 0.5 * found[0][1]


class Nest(nn.Module):
    """Takes and returns tensors in dictionaries, tuples and lists, and None among them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6 if index < 2 else 5)
        self.index = index

    def forward(self, value: Any) -> Any:
        if self.index == 0:
            return {"y": (self.linear(value), None), "skip": [value.detach() * 2]}
        y = value["y"][0]
        skip = value["skip"][0]
        return (
            {"y": (self.linear(y), None), "skip": [skip]}
            if self.index == 1
            else self.linear(y + skip)
        )


def nested(world: World, plan: str) -> list[float]:
    engine = make_engine(world, plan, nn.Sequential(*(Nest(index) for index in range(3))))
    return [engine.step(batch(size), trace=False).loss for size in (16, 6, 16)]


def test_what_a_stage_returns_may_be_nested_and_vary_in_shape(ranks: Run) -> None:
    one = ranks(1, nested, "dp1", plan="dp1")[0]
    for plan in ("pp3:1f1b mb2", "pp3:zb-h1 mb4"):
        assert ranks(3, nested, plan, plan=plan)[0] == pytest.approx(one, rel=1e-5)


class Branch(nn.Module):
    """Returns what cannot be sent."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return (
            (y, "a word")
            if self.what == "word"
            else y.to(torch.complex64)
            if self.what == "complex"
            else y[: int(y[0, 0] > 9)]
        )


def refused(world: World, what: str) -> str:
    with pytest.raises((ModelError, PlanError, ScheduleError)) as caught:
        if what == "layers":
            make_engine(world, "pp2:interleaved,v7 mb4")
        elif what == "counts":
            make_engine(world, "pp2 mb2", cutting=Cutting(counts=(3, 6)))
        elif what == "splits":
            make_engine(world, "pp2 mb2", cutting=Cutting(splits=("blocks.9",)))
        elif what == "example":
            make_engine(world, "pp2 mb2", nn.TransformerEncoderLayer(8, 2)).local_parameters()
        elif what == "micro-batches":
            make_engine(world, "pp2:dualpipev mb2")
        else:
            model = nn.Sequential(Branch(what), nn.Linear(6, 5))
            engine = make_engine(world, "pp2 mb1", model)
            engine.step(batch())
    return str(caught.value)


def server(world: World) -> str:
    with pytest.raises(NotAvailable) as caught:
        make_engine(world, "pp2 dp2:server mb2")
    return str(caught.value)


def test_a_parameter_server_with_a_pipeline_is_refused_with_the_reason(ranks: Run) -> None:
    assert (
        "copies of a tied parameter would lie on different servers"
        in ranks(4, server, plan="pp2 dp2")[0]
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layers", r"14 stages \(7 on each of 2 ranks\) need as many layers, the model has 8"),
        ("counts", "sum to 9; the model has 7 blocks, and 8 layers"),
        ("splits", "no layer is called 'blocks.9'"),
        ("example", r"Cutting\(example="),
        ("micro-batches", "needs at least 4 micro-batches"),
    ],
)
def test_what_cannot_be_is_refused_alike_on_every_rank(ranks: Run, what: str, message: str) -> None:
    for text in ranks(2, refused, what, plan="pp2"):
        assert re.search(message, text), text


def sends(world: World, what: str) -> str:
    if world.rank == 0:
        try:
            return refused(world, what)
        finally:
            world.close(together=False)
    engine = make_engine(world, "pp2 mb1", nn.Sequential(Branch(what), nn.Linear(6, 5)))
    with pytest.raises(RankFailed) as caught:
        engine.step(batch())
    world.close(together=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"), [("word", "'0' returns a str"), ("complex", "returns a complex64 tensor")]
)
def test_a_stage_that_returns_what_cannot_be_sent(ranks: Run, what: str, message: str) -> None:
    """The stage says so; its neighbour says who has left."""
    found = ranks(2, sends, what, plan="pp2", backend="shared")
    assert message in found[0]
    assert "coordinate 0 of the axis" in found[1]


def dies(world: World, plan: str, victim: int) -> tuple[float, str]:
    engine = make_engine(world, plan)
    engine.step(batch(), trace=False)
    if world.rank == victim:
        backward = engine._training_step._handlers[Kind.BACKWARD]
        engine._training_step._handlers[Kind.BACKWARD] = lambda action: (
            os._exit(7) if action.micro_batch == 2 else backward(action)
        )
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        engine.step(batch(), trace=False)
    world.close(together=False)
    return time.monotonic() - began, str(caught.value)


def test_the_neighbours_of_a_rank_that_dies_say_who(ranks: Run) -> None:
    found = ranks(3, dies, "pp3:1f1b mb6", 1, plan="pp3", backend="shared", may_die={1})
    for rank in (0, 2):
        seconds, message = found[rank]
        assert seconds < 10
        assert "coordinate 1 of the axis" in message
        assert "is dead" in message


@pytest.mark.parametrize(
    "plan",
    [
        "pp2:1f1b mb2",
        "pp2:zbv mb2",
        "pp2:zb-h1 dp2:zero1 mb2",
        "pp2:2bw mb3",
        "pp2:pipedream dp2 mb2",
    ],
)
def test_every_probe_of_verify_passes(ranks: Run, plan: str) -> None:
    """Dropout too: a micro-batch takes its random numbers along from stage to stage."""
    task = VerifyTask(problem("gpt"), f"{plan} precision:float64", 3, None, tuple(PROBES))
    report = ranks(4 if "dp2" in plan else 2, run_task, task, plan=plan)[0]
    assert report.ok, report.text()
    least = 7 if "2bw" in plan or "pipedream" in plan else len(PROBES)
    assert len(report.parts) >= least


def run_task(world: World, task: VerifyTask) -> Any:
    return in_world(world, task)


def learns(world: World, plan: str) -> list[float]:
    keys = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 32,
    }
    with torch.device("meta"):
        model = models.make("gpt", **keys)
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        world=world,
    )
    text = torch.tensor(list(inspect.getsource(argparse).encode()[: 40 * 8 * 33])).view(40, 8, 33)
    return [engine.step((tokens[:, :-1], tokens[:, 1:]), trace=False).loss for tokens in text]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "2bw"])
def test_asynchronous_pipelines_learn_the_standard_library(ranks: Run, schedule: str) -> None:
    losses = ranks(2, learns, f"pp2:{schedule} mb2", plan="pp2")[0]
    assert losses[0] > 5.4
    assert sum(losses[-4:]) / 4 < 3.4
