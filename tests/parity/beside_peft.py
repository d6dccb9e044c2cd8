"""Two steps of an engine on a model with adapters, and how they are compared with PEFT's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.state.init import Initializer, place_holders
from plait.models import adapter_files, losses
from tests.parity.harness import TOLERANCE, join, optimizer

SEED = 5
STEPS = 2


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 28, (8, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def logits_loss(output: Any, targets: Tensor) -> Any:
    return losses.cross_entropy(getattr(output, "logits", output), targets)


def with_values(keys: dict[str, Any]) -> Any:
    """A model of this project on one device, with its start, in float64."""
    with torch.device("meta"):
        model = models.make(**keys)
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    return model


def steps_alone(model: Any) -> list[float]:
    """The losses of plain PyTorch on one device, over the whole batch."""
    found = []
    inputs, targets = batch()
    updates = optimizer([p for p in model.parameters() if p.requires_grad])
    for _ in range(STEPS):
        total, count = logits_loss(model(inputs), targets)
        (total / count).backward()
        updates.step()
        updates.zero_grad()
        found.append(float((total / count).detach()))
    return found


def train(world: World, plan: str, model: nn.Module) -> Any:
    """Losses, the elements of each parameter that this rank keeps, and names that it updates."""
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=logits_loss,
        optimizer=optimizer,
        options=Options(seed=SEED),
        world=world,
    )
    axis = world.axis("dp")
    mine = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch())
    found = [engine.step(mine, trace=False).loss for _ in range(STEPS)]
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return found, parts, {piece.name for piece in engine.strategy.pieces}


def check_equal(run: Callable[[], list[Any]], model: nn.Module, truth: Any) -> None:
    """Compare the ranks' results of `train` with PEFT's `losses` and `state`, in its own names."""
    names = adapter_files.peft_names(model)
    results = run()
    found = join([parts for _, parts, _ in results])
    assert set().union(*(owned for *_, owned in results)) == set(names)
    assert set(names.values()) == set(truth.state)
    for losses_of_rank, *_ in results:
        torch.testing.assert_close(losses_of_rank, truth.losses, rtol=TOLERANCE, atol=0)
    for name, peft_name in names.items():
        expected = truth.state[peft_name].flatten()
        error = (found[name] - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE, (name, float(error))
