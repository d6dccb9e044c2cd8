"""Each of torch's schedulers, interrupted and resumed, gives the rates and losses that it gives in
a loop of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import plait
from plait.comm import World
from plait.outer import Change

STEPS = 8
CUT = 4
MakeScheduler = Callable[..., Any]
Losses = list[float]
WAYS = ("scheduler before the load", "scheduler after the load", "last_epoch")


def _one_cycle(optimizer: Any, **more: Any) -> Any:
    return schedulers.OneCycleLR(optimizer, 0.1, total_steps=12, **more)


def _sequence(optimizer: Any, **more: Any) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, 0.1, total_iters=3),
        schedulers.CosineAnnealingLR(optimizer, 6),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3], **more)


def _cyclic(optimizer: Any, **more: Any) -> Any:
    return schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, **more)


KINDS: dict[str, MakeScheduler] = {
    "StepLR": lambda one, **more: schedulers.StepLR(one, 2, gamma=0.5, **more),
    "MultiStepLR": lambda one, **more: schedulers.MultiStepLR(one, [2, 5], **more),
    "ExponentialLR": lambda one, **more: schedulers.ExponentialLR(one, 0.8, **more),
    "CosineAnnealingLR": lambda one, **more: schedulers.CosineAnnealingLR(one, 7, **more),
    "LambdaLR": lambda one, **more: schedulers.LambdaLR(one, lambda step: (step + 1) / 8, **more),
    "OneCycleLR": _one_cycle,
    "CyclicLR": _cyclic,
    "SequentialLR": _sequence,
    "ReduceLROnPlateau": lambda one: schedulers.ReduceLROnPlateau(one, patience=0, threshold=0.5),
}
WITHOUT_LAST_EPOCH = ("SequentialLR", "ReduceLROnPlateau")
CASES = [
    (kind, way)
    for kind in KINDS
    for way in WAYS
    if way != "last_epoch" or kind not in WITHOUT_LAST_EPOCH
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(STEPS, 2, 4, 4, generator=generator, dtype=torch.float64)
    return [(one[0], one[1]) for one in values]


def groups_of(named: Sequence[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    return [{"params": weights}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def adamw(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(named), lr=0.05)


def sgd(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(named), lr=0.05, momentum=0.9)


OPTIMIZERS = {"AdamW": adamw, "SGD": sgd}


class OfTorch:
    """A model and an optimizer of one device."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = net()
        self.optimizer = make(list(self.model.named_parameters()))

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        path.mkdir()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), path / "state.pt")

    def load(self, path: Path) -> None:
        model, optimizer = torch.load(path / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class OfEngine:
    """The same, of an engine."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.engine = plait.build(
            net(),
            "dp1 precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: make(params.named()),
        )
        self.optimizer = self.engine.update.optimizer
        self.save = self.engine.save
        self.load = self.engine.load

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        return self.engine.step(batch).loss


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def trained(
    build: Callable[[], OfTorch | OfEngine], make: MakeScheduler, way: str, folder: Path
) -> tuple[Losses, list[list[dict[str, Any]]]]:
    """The losses of a run that is resumed once in a way, and the groups at each step."""
    run = build()
    scheduler = make(run.optimizer)
    losses, groups = [], []
    for index, batch in enumerate(batches()):
        if index == CUT and way:
            run.save(folder)
            told = scheduler.state_dict()
            run = build()
            if way == WAYS[0]:
                scheduler = make(run.optimizer)
            run.load(folder)
            if way == WAYS[1]:
                scheduler = make(run.optimizer)
            if way == WAYS[2]:
                scheduler = make(run.optimizer, last_epoch=CUT - 1)
            else:
                scheduler.load_state_dict(told)
        losses.append(run.step(batch))
        is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        scheduler.step(*([losses[-1]] if is_plateau else []))
        groups.append(settings(run.optimizer))
    return losses, groups


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_resumed_scheduler_is_that_of_one_device(
    kind: str, optimizer: str, way: str, tmp_path: Path
) -> None:
    make = KINDS[kind]
    own = OPTIMIZERS[optimizer]
    losses, groups = trained(lambda: OfEngine(own), make, way, tmp_path / "plait")
    wanted, rates = trained(lambda: OfTorch(own), make, way, tmp_path / "torch")
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert groups == rates
    if way == "scheduler before the load":
        alone, _ = trained(lambda: OfTorch(own), make, "", tmp_path)
        assert losses == pytest.approx(alone, rel=1e-10)


def rates_resumed(world: World | None, plan: str, folder: Path) -> list[float]:
    """The rates of a run of one weight, that goes on by `last_epoch`."""
    rates = []
    for is_resumed in (False, True):
        engine = plait.build(
            nn.Linear(1, 1, bias=False),
            plan,
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            world=world,
        )
        if is_resumed:
            engine.load(folder / "first")
        scheduler = schedulers.StepLR(
            engine.update.optimizer, 1, gamma=0.5, last_epoch=0 if is_resumed else -1
        )
        engine.step((torch.ones(4, 1), torch.ones(4, 1)))
        scheduler.step()
        if not is_resumed:
            engine.save(folder / "first")
        rates.append(engine.update.optimizer.param_groups[0]["lr"])
    return rates


def test_a_rank_without_parameters_goes_on_too(ranks: Any, tmp_path: Path) -> None:
    expected = rates_resumed(None, "dp1", tmp_path / "alone")
    for rates in ranks(2, rates_resumed, "dp2:zero1", tmp_path, plan="dp2:zero1"):
        assert rates == expected


def test_the_factor_of_one_update_is_in_no_checkpoint(tmp_path: Path) -> None:
    engine = OfEngine(sgd).engine
    for folder in (tmp_path / "first", tmp_path / "second"):
        engine.update.make(Change(0, 1.0, rate=0.5))  # a server's, for a part of its workers
        engine.save(folder)
        engine.load(folder)
        assert [group["lr"] for group in engine.update.optimizer.param_groups] == [0.05, 0.02]
