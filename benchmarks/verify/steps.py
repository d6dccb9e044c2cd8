"""Random training steps that are right, and faults to plant in them; all in one process.

A step stands for several ranks: each computes on its samples, in micro-batches, and the gradients
are summed in one of the ways that parallel code has. Nothing here calls a collective.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.verify.model import FAMILIES, How, cross_entropy, data, set_how

Gradients = list[Tensor]


@dataclass(frozen=True)
class Cell:
    """One training step: its model, its split, its optimizer, and its fault if it has one."""

    seed: int
    family: str
    depth: int
    ranks: int
    micro_batches: int
    how: How
    reduction: str
    optimizer: str
    clip: float | None
    masked: bool
    samples: int = 12
    lr: float = 0.02
    fault: str = ""
    kept: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return (
            f"{self.family} {self.depth}, dp{self.ranks} mb{self.micro_batches} tp{self.how.parts} "
            f"cp{self.how.blocks}, {self.reduction}, {self.optimizer}"
            f"{', clipped' if self.clip else ''}{', masked' if self.masked else ''}"
        )


REDUCTIONS = ("sum", "divided", "ring", "float32")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "foreach")


def drawn(number: int) -> Cell:
    """The cell of a number."""
    draw = random.Random(number)
    family = draw.choice(list(FAMILIES))
    how = How(parts=draw.choice([1, 2, 4]), blocks=draw.choice([1, 2, 3]))
    return Cell(
        number,
        family,
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 4]),
        draw.choice([1, 2, 3]),
        how,
        draw.choice(REDUCTIONS),
        draw.choice(OPTIMIZERS),
        draw.choice([None, 0.3]),
        draw.choice([False, True]),
    )


def functions(cell: Cell) -> dict[str, Callable[..., Any]]:
    """`make`, `prepare` and `train_step` of a cell, as a file of a training step has them."""

    def make() -> tuple[nn.Module, Sequence[Any], Callable[..., Tensor]]:
        torch.manual_seed(cell.seed)
        model = FAMILIES[cell.family](cell.depth)
        batches = data(cell.family, cell.samples, 3, cell.masked)
        return model, batches, cross_entropy

    def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        set_how(model, cell.how)
        return model, _optimizer(cell, model)

    def train_step(state: Any, batch: Any, loss: Any) -> Tensor:
        return _step(cell, *state, batch)

    return {"make": make, "prepare": prepare, "train_step": train_step}


def _optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if cell.fault == "one parameter in no optimizer":
        params = params[:-1]
    if cell.optimizer in ("sgd", "momentum"):
        momentum = 0.9 if cell.optimizer == "momentum" else 0.0
        return torch.optim.SGD(params, lr=cell.lr, momentum=momentum)
    kind = torch.optim.Adam if cell.optimizer == "adam" else torch.optim.AdamW
    # The square of a small gradient is zero in float16: nobody trains so without a larger eps.
    eps = 1e-3 if params[0].dtype == torch.float16 else 1e-5
    return kind(params, lr=cell.lr / 4, eps=eps, foreach=cell.optimizer == "foreach")


def _step(
    cell: Cell, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    inputs, targets = batch
    count = _count(targets)
    params = [one for one in model.parameters() if one.requires_grad]
    by_rank: list[Gradients] = []
    losses: list[Tensor] = []
    number = 0
    for mine, known in zip(inputs.chunk(cell.ranks), targets.chunk(cell.ranks), strict=True):
        total = [torch.zeros_like(one) for one in params]
        parts = zip(
            mine.tensor_split(cell.micro_batches),
            known.tensor_split(cell.micro_batches),
            strict=True,
        )
        for one, target in parts:
            value, grads = _slice(cell, model, params, one, target, count, number)
            number += 1
            losses.append(value)
            total = [a + b for a, b in zip(total, grads, strict=True)]
        by_rank.append(_of_rank(cell, total, len(by_rank)))
    reduced = _reduced(cell, by_rank)
    for parameter, grad in zip(params, _changed(cell, model, reduced), strict=True):
        parameter.grad = grad
    if cell.clip is not None:
        torch.nn.utils.clip_grad_norm_(params, cell.clip)
    _update(cell, model, optimizer)
    return torch.stack([one.detach() for one in losses]).sum()


def _count(targets: Tensor) -> float:
    return float((targets != -100).sum())


def _slice(
    cell: Cell,
    model: nn.Module,
    params: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    count: float,
    number: int,
) -> tuple[Tensor, Gradients]:
    """The loss of one micro-batch as its share of the global mean, and its gradients."""
    share = _count(targets) / count
    if cell.fault == "mean of means":
        share = 1.0 / (cell.ranks * cell.micro_batches)
    if cell.fault == "masked targets counted":
        share = targets.numel() / count
    if cell.fault == "targets shifted by one" and number == 0:
        targets = targets.roll(1, dims=-1)
    if cell.fault == "a sample left out" and number == 0:
        targets = targets.clone()
        targets[0] = targets[-1]
    value = cross_entropy(model(inputs), targets) * share
    grads = list(torch.autograd.grad(value, params))
    factor = {
        "a micro-batch dropped": 0.0 if number == 0 else 1.0,
        "a micro-batch twice": 2.0 if number == 0 else 1.0,
    }.get(cell.fault, 1.0)
    return value, [grad * factor for grad in grads]


def _of_rank(cell: Cell, grads: Gradients, rank: int) -> Gradients:
    """A rank's own part, before the sum."""
    if cell.fault == "clipped before the sum":
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        return [grad * min(1.0, 0.05 / float(norm)) for grad in grads]
    if cell.fault == "factor of a rank":
        return [grad * (1.0 + 0.5 * (rank > 0)) for grad in grads]
    if cell.reduction == "divided":
        return [grad / cell.ranks for grad in grads]
    return grads


def _reduced(cell: Cell, by_rank: Sequence[Gradients]) -> Gradients:
    """The sum over ranks, in the way of the cell."""
    if cell.fault == "no sum over ranks":
        return [grad * cell.ranks for grad in by_rank[0]]
    found = []
    for grads in zip(*by_rank, strict=True):
        if cell.reduction == "ring":
            found.append(_ring(grads))
        elif cell.reduction == "float32":
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            found.append(torch.stack([one.to(wide) for one in grads]).sum(0).to(grads[0].dtype))
        else:
            total = grads[0]
            for one in grads[1:]:
                total = total + one
            back = cell.ranks if cell.reduction == "divided" else 1
            found.append(total * back)
    return found


def _ring(grads: Sequence[Tensor]) -> Tensor:
    """Each range is summed beginning with another rank."""
    size = len(grads)
    flat = [one.flatten().tensor_split(size) for one in grads]
    sums = []
    for part in range(size):
        total = flat[part % size][part]
        for rank in range(1, size):
            total = total + flat[(part + rank) % size][part]
        sums.append(total)
    return torch.cat(sums).view_as(grads[0])


def _changed(cell: Cell, model: nn.Module, grads: Gradients) -> Gradients:
    """What a fault does with the summed gradients."""
    factor = {
        "times the ranks": float(cell.ranks),
        "gradients 1 % too large": 1.01,
        "gradients 10 % too large": 1.1,
    }.get(cell.fault, 1.0)
    grads = [grad * factor for grad in grads] if factor != 1.0 else list(grads)
    if cell.fault == "one gradient twice":
        grads[0] = grads[0] * 2
    if cell.fault == "half of one gradient lost":
        flat = grads[-2].flatten().clone()
        flat[len(flat) // 2 :] = 0
        grads[-2] = flat.view_as(grads[-2])
    if cell.fault == "gradients kept":
        before = cell.kept.get("grads")
        cell.kept["grads"] = [grad.clone() for grad in grads]
        if before is not None:
            grads = [a + b for a, b in zip(grads, before, strict=True)]
    return grads


def _update(cell: Cell, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if cell.fault == "one parameter does not move":
        first = next(model.parameters())
        before = first.detach().clone()
        optimizer.step()
        first.data.copy_(before)
    elif cell.fault == "updated twice":
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad * cell.lr)
    else:
        optimizer.step()
    if cell.fault == "moments lost" and cell.optimizer != "sgd":
        optimizer.state.clear()
    if cell.fault == "weights decay too":
        for parameter in model.parameters():
            parameter.data.mul_(0.98)


FAULTS: dict[str, dict[str, Any]] = {
    "no sum over ranks": {"ranks": 2},
    "times the ranks": {"ranks": 2},
    "factor of a rank": {"ranks": 2, "reduction": "sum"},
    "clipped before the sum": {"ranks": 2, "reduction": "sum", "clip": None},
    "mean of means": {"ranks": 2, "family": "transformer", "masked": True},
    "masked targets counted": {"family": "transformer", "masked": True},
    "a micro-batch dropped": {"micro_batches": 3},
    "a micro-batch twice": {"micro_batches": 3},
    "a sample left out": {"ranks": 2},
    "targets shifted by one": {"ranks": 2},
    "gradients 1 % too large": {"clip": None},
    "gradients 10 % too large": {"clip": None},
    "one gradient twice": {},
    "half of one gradient lost": {},
    "gradients kept": {"clip": None},
    "one parameter in no optimizer": {},
    "one parameter does not move": {},
    "updated twice": {"optimizer": "sgd"},
    "moments lost": {"optimizer": "momentum"},
    "weights decay too": {},
    "a part of a product lost": {"how": How(parts=2, lost_part=True)},
    "bias added by each rank": {"how": How(parts=4, bias_each=True)},
    "no rescaling in a ring": {"how": How(blocks=3, no_rescale=True), "family": "transformer"},
    "scale of attention": {"how": How(scale=2.0), "family": "transformer"},
    "backward without slope": {"how": How(wrong_slope=True)},
    "another eps of a norm": {"how": How(eps=1e-1), "family": "transformer"},
}
"""Each fault, with what a cell needs for it to be one."""


def faulty(name: str, number: int) -> Cell:
    """The cell of a number with this fault planted."""
    return replace(drawn(number), fault=name, **FAULTS[name])
