"""Activations that travel in two bytes a number: half the bytes, an error with a bound, and what
`verify` says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import plait
from plait import models
from plait.cli import common
from plait.comm import Axis, Work, World
from plait.comm.functional import transition
from plait.config import Train, load
from plait.engine.build import build
from plait.engine.options import Options
from plait.errors import ConfigError, PlanError
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.transport import Transport
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, run
from tests.helpers.threaded import threaded
from tests.parity.test_predicted_traffic import BATCH, SEQ_LEN, VOCABULARY, batches, sizes
from tests.parity.verify_problems import MODELS, problem

Run = Callable[..., list[Any]]
LAST_PLACE = 2.0**-8
"""What one rounding to bf16 changes at most, relative."""
ROWS = [
    (PARTIAL, INVARIANT),
    (PARTIAL, Sharded(0)),
    (Sharded(0), REPLICATED),
    (Sharded(0), Sharded(1)),
]
CONFIG: dict[str, Any] = {
    "model": MODELS["even"],
    "data": {"name": "random", "seq_len": 8},
    "train": {"global_batch": 8, "messages": "bf16"},
}
PLANS = [
    *("tp2", "tp2:1d,sp dp2:zero3 mb2 remat:full", "pp4:gpipe mb4", "pp2:1f1b tp2:1d,sp mb2"),
    *(
        pytest.param(plan, marks=pytest.mark.long)
        for plan in ("tp4", "tp2 remat:selective", "pp2:1f1b mb2", "pp2:zbv tp2 mb4")
    ),
]


def moved(world: World, source: Layout, target: Layout) -> tuple[Tensor, ...]:
    """What a rank has, what comes of it whole and rounded, and the bytes of both."""
    generator = torch.Generator().manual_seed(world.rank)
    own = torch.randn(8, 8, generator=generator)
    axis = world.axis("tp")
    whole = transition(own, axis, source, target)
    before = axis.ledger.by_axis()["tp"]
    rounded = transition(own, axis.rounding(torch.bfloat16), source, target)
    sent = torch.tensor([before, axis.ledger.by_axis()["tp"] - before])
    of_sizes = transition(own.abs(), axis, source, target)
    return whole, rounded, of_sizes, sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("source", "target"), ROWS)
def test_a_message_is_half_and_its_error_has_a_bound(
    source: Layout, target: Layout, size: int
) -> None:
    """Each summand is rounded once, and each sum once more, whatever the number of ranks."""
    roundings = 2.01 if source == PARTIAL else 1
    for whole, rounded, of_sizes, sent in threaded(size, moved, source, target, plan=f"tp{size}"):
        assert rounded.dtype == torch.float32
        assert sent[0] == 2 * sent[1]
        assert not torch.equal(whole, rounded)
        assert ((whole - rounded).abs() <= roundings * LAST_PLACE * of_sizes).all()


def test_integers_and_what_is_narrow_travel_as_they_are() -> None:
    def counts(world: World) -> None:
        axis = world.axis("tp").rounding(torch.bfloat16)
        large = torch.tensor([257])
        assert transition(large, axis, Sharded(0), REPLICATED).tolist() == [257, 257]
        half = torch.ones(2, dtype=torch.float16)
        assert transition(half, axis, PARTIAL, INVARIANT).dtype == torch.float16

    threaded(2, counts, plan="tp2")


def steps(world: World, text: str, messages: Any) -> tuple[dict[str, int], list[Any]]:
    """Bytes of the second step by axis; losses and gradients of both."""
    plan = Plan.parse(text)
    keys = sizes("gpt", plan)
    with torch.device("meta"):
        model = models.make(
            keys["name"], **{key: one for key, one in keys.items() if key != "name"}
        )
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(messages=messages),
        world=world,
    )
    seen: list[Any] = []
    grads: list[Any] = []
    engine.before_update.append(lambda one: grads.append(one.local_gradients()))
    data = batches(keys, world)
    for _ in range(2):
        result = engine.step(next(data), trace=False)
        seen.append((result.loss, {part.name: part.values.clone() for part in grads.pop()}))
    return result.ledger.by_axis(), seen


@pytest.mark.parametrize("text", PLANS)
def test_bytes_are_those_predicted_and_gradients_are_near(ranks: Run, text: str) -> None:
    plan = Plan.parse(text)
    rounded = ranks(plan.world_size, steps, text, "bf16", plan=text)
    whole = ranks(plan.world_size, steps, text, "whole", plan=text)
    config: dict[str, Any] = {
        "model": sizes("gpt", plan),
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch": BATCH, "messages": "bf16"},
    }
    predicted = plait.estimate(config, text, "h100x64").traffic
    most = {axis: max(sent.get(axis, 0) for sent, _ in rounded) for axis in predicted}
    assert most == {axis: math.floor(sent) for axis, sent in predicted.items()}
    for (_, own), (_, truth) in zip(rounded, whole, strict=True):
        for (loss, grads), (true_loss, true_grads) in zip(own, truth, strict=True):
            assert loss == pytest.approx(true_loss, rel=LAST_PLACE)
            assert loss != true_loss
            gap = torch.cat([(grads[name] - true_grads[name]).flatten() for name in grads]).norm()
            size = torch.cat([value.flatten() for value in true_grads.values()]).norm()
            assert gap <= 4 * LAST_PLACE * size


def test_two_bytes_halve_what_activations_take() -> None:
    """The numbers of the loss over a vocabulary in parts travel whole."""
    rounded, _ = threaded(2, steps, "tp2", "bf16", plan="tp2")[0]
    whole, _ = threaded(2, steps, "tp2", "whole", plan="tp2")[0]
    loss = 3 * BATCH * SEQ_LEN * 4
    assert whole["tp"] - loss == 2 * (rounded["tp"] - loss)
    assert VOCABULARY > 1


def losses_of(world: World, text: str, messages: Any) -> list[float]:
    """The loss of each of thirty steps on the same batches."""
    plan = Plan.parse(text)
    keys = sizes("gpt", plan)
    with torch.device("meta"):
        model = models.make(
            keys["name"], **{key: one for key, one in keys.items() if key != "name"}
        )
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        options=Options(messages=messages),
        world=world,
    )
    batch = next(batches(keys, world))
    return [engine.step(batch, trace=False).loss for _ in range(30)]


@pytest.mark.long
@pytest.mark.parametrize("text", ["tp2", "pp2:1f1b mb2"])
def test_the_loss_falls_alike(text: str) -> None:
    rounded, whole = (threaded(2, losses_of, text, one, plan=text)[0] for one in ("bf16", "whole"))
    assert whole[-1] < 0.5 * whole[0]
    assert rounded == pytest.approx(whole, abs=0.02 * whole[0])
    assert rounded != whole


def test_estimates_know_the_key() -> None:
    model = {**MODELS["even"], "hidden_size": 1024, "intermediate_size": 4096}
    config: dict[str, Any] = {"model": {**model, "max_position_embeddings": 512}}
    config |= {"data": {"seq_len": 512}, "train": {"global_batch": 16}}
    rounded = {**config, "train": {"global_batch": 16, "messages": "bf16"}}

    def seconds(plan: str) -> list[float]:
        return [plait.estimate(one, plan, "l40sx8").step_seconds for one in (config, rounded)]

    whole, half = seconds("tp2")
    assert half < 0.9 * whole
    whole, half = seconds("tp2 precision:bf16")  # two bytes already
    assert half == whole


@pytest.mark.parametrize("text", ["tp4:2d", "tp8:3d"])
def test_grids_move_weights_too_and_refuse(text: str) -> None:
    why = r"also moves weights .* use tp\d:1d"
    with pytest.raises(PlanError, match=why):
        threaded(Plan.parse(text).world_size, steps, text, "bf16", plan=text)
    with pytest.raises(PlanError, match=why):
        plait.estimate(CONFIG, text, "h100x64")
    with pytest.raises(PlanError, match=why):
        run(load(CONFIG), text)
    with pytest.raises(PlanError, match=why):
        common.plan_of(load(CONFIG), text)


def test_the_search_takes_no_grid_then() -> None:
    plans = [one.plan for one in plait.choose(CONFIG, "h100x4", fix="tp4", top=40)]
    assert plans
    assert all(plan.tp.mode == "1d" for plan in plans)


@pytest.mark.parametrize("text", ["dp2", "tp2 precision:bf16"])
def test_plans_without_such_messages_say_so(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    common.plan_of(load(CONFIG), text)
    assert "train.messages 'bf16' does nothing" in capsys.readouterr().err
    common.plan_of(load(CONFIG), "tp2")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text", ["dp2", "tp2 precision:bf16"])
def test_and_train_as_without_the_key(text: str) -> None:
    rounded, whole = (threaded(2, steps, text, one, plan=text)[0][1] for one in ("bf16", "whole"))
    for (loss, grads), (true_loss, true_grads) in zip(rounded, whole, strict=True):
        assert loss == true_loss
        assert all(torch.equal(grads[name], true_grads[name]) for name in true_grads)


def test_the_key_has_two_words() -> None:
    assert Train().messages == "whole"
    with pytest.raises((ConfigError, ValueError), match="messages"):
        Train.model_validate({"messages": "int8"})
    with pytest.raises(PlanError, match="messages 'int8' is none of whole, bf16"):
        threaded(2, steps, "tp2", "int8", plan="tp2")


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


def with_larger_gradients(world: Any, task: VerifyTask) -> Report:
    """Each gradient that a stage receives is 6 % too large."""
    take = Transport.take_gradients

    def larger(self: Transport, stage: int, micro_batch: int) -> list[Tensor]:
        return [1.06 * one for one in take(self, stage, micro_batch)]

    with patch.object(Transport, "take_gradients", larger):
        return in_world(world, task)


def with_larger_sums(world: Any, task: VerifyTask) -> Report:
    """Each rounded message that tensor ranks add up is 6 % too large."""
    add = Axis.all_reduce

    def larger(self: Axis, tensor: Tensor, **how: Any) -> Work:
        return add(self, tensor if self.wire is None else 1.06 * tensor, **how)

    with patch.object(Axis, "all_reduce", larger):
        return in_world(world, task)


def judged(run: Run, plan: str, fn: Callable[..., Report] = run_task) -> Report:
    """The part of a proof that trains as training will."""
    even = replace(problem("even"), data={"name": "random", "seq_len": 8})
    text = f"{plan} precision:float64"
    task = VerifyTask(even, text, 2, None, ("sgd",), training="float32", messages="bf16")
    report: Report = run(Plan.parse(plan).world_size, fn, task, plan=plan)[0]
    (part,) = [one for one in report.parts if one.title == "training-float32"]
    return part


@pytest.mark.long
@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "tp2", "tp2:1d,sp"])
def test_verify_judges_rounded_messages_by_what_bf16_does(ranks: Run, plan: str) -> None:
    part = judged(ranks, plan)
    assert part.ok, part.text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "fault"), [("pp2:1f1b mb2", with_larger_gradients), ("tp2", with_larger_sums)]
)
def test_and_finds_what_rounding_does_not_explain(
    ranks: Run, plan: str, fault: Callable[..., Report]
) -> None:
    assert not judged(ranks, plan, fault).ok


@pytest.mark.long
def test_verify_says_what_it_has_compared() -> None:
    config = {"model": MODELS["even"], "data": {"name": "random", "seq_len": 8}}
    report = run({**config, "train": {"messages": "bf16"}}, "tp2", steps=2, probes=["sgd"])
    assert report.ok
    assert any("equality is of whole messages" in note for note in report.as_dict()["notes"])
