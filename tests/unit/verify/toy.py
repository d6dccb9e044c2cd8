"""A toy run in plain torch whose slices are known, and from which any wrong gradient can be
composed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.verify import Observation, Recipe, Record, Slice, run_reference

RANKS = 2
MICRO = 3
COUNTS = {(0, 0): 1, (0, 1): 2, (0, 2): 3, (1, 0): 2, (1, 1): 4, (1, 2): 5}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 2, dtype=torch.float64)
        self.idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(len(output))


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def batches(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    total = sum(COUNTS.values())
    return [
        (
            torch.randn(total, 4, generator=generator, dtype=torch.float64),
            torch.randn(total, 2, generator=generator, dtype=torch.float64),
        )
        for _ in range(steps)
    ]


def slices(step: int, batch: tuple[Tensor, Tensor]) -> list[Slice]:
    sizes = list(COUNTS.values())
    parts = zip(batch[0].split(sizes), batch[1].split(sizes), strict=True)
    return [Slice(rank, micro, part) for (rank, micro), part in zip(COUNTS, parts, strict=True)]


def reference(
    clip: float | None = None, *, contributions: bool = True, steps: int = 2, optimizer=sgd
) -> Record:
    recipe = Recipe(loss, optimizer, clip_grad_norm=clip)
    return run_reference(Toy(), batches(steps), recipe, slices, contributions=contributions)


def altered(record: Record, step: int = 0, **changes) -> Record:
    """The record with some fields of one step changed; everything is copied, as a second run would
    be.
    """
    steps = [
        Observation(s.loss, clone(s.grads), clone(s.params), s.grad_norm, s.lr, s.ranks)
        for s in record.steps
    ]
    steps[step] = Observation(**{**vars(steps[step]), **changes})
    return Record(None if record.start is None else clone(record.start), steps)


def clone(tensors):
    return {name: None if value is None else value.clone() for name, value in tensors.items()}


def weighted(record: Record, step: int, weight) -> dict[str, Tensor | None]:
    """The gradient in which the slice (rank, micro-batch, count) counts `weight(part)` times."""
    parts = record.steps[step].contributions
    total = sum(part.count for part in parts)
    names = record.steps[step].grads
    return {
        name: None
        if names[name] is None
        else sum(weight(part) * part.grads[name] for part in parts) / total  # type: ignore[misc]
        for name in names
    }
