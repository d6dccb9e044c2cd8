"""The reference of asynchronous pipelines: one device that applies the same rule of delayed
gradients.

There is no pipeline and no rank. For each micro-batch of the stream every stage's weights are put
to the version that the rule gives its forward. One forward and backward of the whole model runs.
Each stage's gradient goes into the update that the rule says. PipeDream (arXiv 1806.03377, section
3.3) and PipeDream-2BW (arXiv 2006.09503, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.models.parameters import Parameters
from plait.parallel.pipeline.weights import StageWeights
from plait.verify.record.observation import Tensors
from plait.verify.reference.batches import Batch, num_samples
from plait.verify.reference.copied import copied
from plait.verify.reference.losses import loss_sum
from plait.verify.reference.one_device import call
from plait.verify.reference.recipe import Recipe


@dataclass(frozen=True)
class DelayedRecord:
    """The mean loss of each step, and the parameters after all updates."""

    losses: Sequence[float]
    params: Tensors
    num_tokens: float = 0.0


@dataclass
class _DelayedStage:
    """The parameters of one stage: all versions, and what is gathered for the next."""

    params: list[nn.Parameter]
    weights: StageWeights
    optimizer: torch.optim.Optimizer
    rates: list[float]
    versions: list[list[Tensor]] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    count: float = 0.0

    def show(self, version: int) -> None:
        for param, value in zip(self.params, self.versions[version], strict=True):
            param.data = value.clone()

    def gather(self, count: float) -> None:
        """Add the gradients of one micro-batch."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                before = self.grads[index]
                self.grads[index] = param.grad if before is None else before + param.grad
            param.grad = None
        self.count += count

    def update(self, factor: float) -> None:
        """Make the next version from the newest."""
        self.show(-1)
        if not self.count:  # no micro-batch had a sample
            self.versions.append(self.versions[-1])
            return
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = None if grad is None else grad / self.count
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        torch_internals.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.versions.append([param.detach().clone() for param in self.params])
        self.grads = [None] * len(self.params)
        self.count = 0.0


def run_delayed(
    model: nn.Module,
    stream: Sequence[Sequence[Batch]],
    recipe: Recipe,
    stages: Sequence[tuple[Iterable[str], StageWeights]],
    begin: Callable[[int], Any] = lambda micro_batch: None,
) -> DelayedRecord:
    """Train a copy of `model` on a stream of steps, each a list of micro-batches.

    `stages` are the names of each stage's parameters and which versions its micro-batches see and
    change. `begin` is called before each micro-batch (to seed random numbers).
    """
    model = copied(model)
    named = dict(model.named_parameters())
    stages_made = []
    for names, weights in stages:
        params = Parameters([(name, named[name]) for name in names])
        stages_made.append(_stage(params, weights, recipe))
    losses: list[float] = []
    number = 0
    num_tokens = 0.0
    for step, micro_batches in enumerate(stream):
        total = tokens = 0.0
        for batch in micro_batches:
            for stage in stages_made:
                stage.show(stage.weights.seen[number])
            begin(number)
            count = 0.0
            if num_samples(batch):
                loss, count = loss_sum(recipe.loss, call(model, batch[0]), batch)
                loss.backward()
                total = total + float(loss.detach())
                tokens = tokens + count
            for stage in stages_made:
                stage.gather(count)
                if stage.weights.applied.get(number + 1) != stage.weights.applied[number]:
                    stage.update(recipe.lr_factor(step))
            number += 1
        losses.append(total / tokens)
        num_tokens += tokens
    for stage in stages_made:
        stage.show(-1)
    return DelayedRecord(
        losses, {name: param.detach().clone() for name, param in named.items()}, num_tokens
    )


def _stage(params: Parameters, weights: StageWeights, recipe: Recipe) -> _DelayedStage:
    optimizer = recipe.made(params)
    rates = [group["lr"] for group in optimizer.param_groups]
    stage = _DelayedStage(params, weights, optimizer, rates, grads=[None] * len(params))
    stage.versions.append([param.detach().clone() for param in params])
    return stage
