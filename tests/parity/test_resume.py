"""A run that is saved under one plan and goes on under another is the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.errors import CheckpointError
from plait.models.losses import cross_entropy
from plait.plan import Plan
from tests.parity.families import FAMILIES, family_of
from tests.parity.harness import SEED, join, optimizer

Run = Callable[..., list[Any]]
PLANS = [
    "dp4:zero3",
    "dp2:zero1",
    "dp1",
    "dp2:server mb2",
    "dp4:zero3,replicate2",
    "dp2:ring",
    "dp2:zero2 mb3",
    "dp4",
]


def engine_of(world: World, plan: str, family: str = "gpt", make: Any = optimizer) -> Engine:
    model = family_of(family).model()
    return build(
        model,
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=make,
        options=Options(seed=SEED),
        world=world,
    )


def share(world: World, step: int, family: str = "gpt") -> tuple[Tensor, Tensor]:
    axis = world.axis("dp")
    inputs, targets = family_of(family)._batch(8, torch.Generator().manual_seed(step))
    return inputs.tensor_split(axis.size)[axis.rank], targets.tensor_split(axis.size)[axis.rank]


def train(
    world: World, plan: str, first: int, last: int, load: str | None, save: str | None, family: str
) -> Any:
    engine = engine_of(world, plan, family)
    if load is not None:
        meta = engine.load(load)
        assert meta["note"] == "kept"
        assert engine.step_index == first
    losses = [
        engine.step(share(world, step, family), trace=False).loss for step in range(first, last)
    ]
    if save is not None:
        engine.save(save, note="kept")
    return losses, [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]


EXPERT_PLANS = [
    "dp2 ep2",
    "dp4:zero3 ep2",
    "cp2:ring dp2:zero1 ep4",
    "dp2 ep2 tp2",
    "pp2:1f1b dp2 ep2 mb2",
    "dp1",
    "dp4 ep4",
]
TENSOR_PLANS = [
    "tp2 dp2:zero1",
    "tp4:2d",
    "dp2:zero3",
    "tp8:3d",
    "tp4:1d,sp",
    "tp8:2.5d,depth2",
    "tp2:1d,sp dp2:zero3",
]


@pytest.mark.parametrize(
    ("family", "plans"),
    [
        ("gpt", PLANS),
        ("resnet-batch", PLANS[:2]),
        ("split-gpt", TENSOR_PLANS),
        ("deepseek-bias", EXPERT_PLANS),
    ],
)
def test_a_chain_of_plans_equals_one_run(
    ranks: Run, tmp_path: Path, family: str, plans: list[str]
) -> None:
    steps = len(plans)
    truth_losses, truth = ranks(1, train, "dp1", 0, steps, None, None, family)[0]
    losses = []
    previous = None
    results = None
    for step, plan in enumerate(plans):
        target = str(tmp_path / f"step-{step + 1}")
        size = Plan.parse(plan).world_size
        results = ranks(size, train, plan, step, step + 1, previous, target, family, plan=plan)
        losses += results[0][0]
        previous = target
    assert results is not None
    if family == "resnet-batch":
        assert (
            losses[0] != truth_losses[0]
        )  # its statistics are those of a rank; that it loads is what is shown here
        return
    assert losses == pytest.approx(truth_losses, rel=1e-10)
    whole = join([parts for _, parts in results])
    expected = join([truth])
    for name, value in expected.items():
        assert float((whole[name] - value).abs().max()) <= 1e-10 * max(
            1.0, float(value.abs().max())
        ), name


def frozen_chain(world: World, plan: str, path: str, loads: bool) -> float:
    model = FAMILIES["llama"].model()
    for name, param in model.named_parameters():
        param.requires_grad_("blocks.0" in name or "head" in name)
    engine = build(
        model,
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED + loads),
        world=world,
    )
    if loads:
        engine.load(path)
    loss = engine.step(share(world, int(loads), "llama")).loss
    if not loads:
        engine.save(path)
    return loss


@pytest.mark.parametrize(
    ("first", "second"), [("dp2:zero3", "dp1"), ("dp1", "dp2:zero3"), ("dp2:zero1", "dp4:zero3")]
)
def test_frozen_parameters_travel_too(ranks: Run, tmp_path: Path, first: str, second: str) -> None:
    """The second run starts from another seed, so what it has it has from the checkpoint."""
    path = str(tmp_path / "saved")
    ranks(int(first[2]), frozen_chain, first, path, False, plan=first)
    again = ranks(int(second[2]), frozen_chain, second, path, True, plan=second)[0]
    alone = ranks(1, frozen_chain, "dp1", str(tmp_path / "alone"), False)[0]
    same = ranks(1, frozen_chain, "dp1", str(tmp_path / "alone"), True)[0]
    assert again == pytest.approx(same, rel=1e-10)
    assert alone != same


def wrong_optimizer(world: World, path: str) -> str:
    engine_of(world, "dp1").save(path)
    with pytest.raises(CheckpointError) as caught:
        engine_of(world, "dp1", make=lambda p: torch.optim.SGD(p, lr=0.1)).load(path)
    return str(caught.value)


def test_another_optimizer_is_refused(ranks: Run, tmp_path: Path) -> None:
    assert (
        "was saved with AdamW and this run updates with SGD"
        in ranks(1, wrong_optimizer, str(tmp_path / "saved"))[0]
    )


def wrong_model(world: World, path: str) -> str:
    engine_of(world, "dp1").save(path)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    engine = build(
        other, "dp1 precision:float64", loss=cross_entropy, optimizer=optimizer, world=world
    )
    with pytest.raises(CheckpointError) as caught:
        engine.load(path)
    return str(caught.value)


def test_another_model_is_refused(ranks: Run, tmp_path: Path) -> None:
    message = ranks(1, wrong_model, str(tmp_path / "saved"))[0]
    assert "of another model" in message
    assert "0.weight" in message
