"""A client: an engine, the samples that never leave it, and what one round asks of them.

The engine may be parallel: every rank of its world calls the same methods, and the whole vectors are the same on all of them.
One engine serves many simulated clients in turn, because a client is its samples and its small state (`Samples`), not a
model: a thousand clients take the memory of one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.datasets import Loader
from plait.engine.batch import call
from plait.engine.engine import Engine
from plait.engine.init import derive_seed
from plait.federated.messages import Reply, Task


@dataclass(frozen=True)
class Local:
    """How a client trains: passes over its samples, batch size, FedProx's mu, SCAFFOLD's corrections (needs the rate)."""

    epochs: int = 1
    batch: int = 16
    mu: float = 0.0
    scaffold_lr: float | None = None
    seed: int = 0


class Part:
    """Some samples of a data set, as a data set."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self._dataset, self._indices = dataset, torch.as_tensor(list(indices), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    def batch(self, indices: Tensor) -> Any:
        """The pairs stacked."""
        return self._dataset.batch(self._indices[indices])


@dataclass
class Samples:
    """One client's own: what it trains on, what it is judged on, and what it keeps from round to round."""

    client: int
    train: Part
    test: Part
    control: Tensor | None = None


def get_weights(engine: Engine) -> Tensor:
    """All trainable parameters, end to end in the order of their names, whole on every rank. Collective."""
    parts = [(piece.name, piece.part.start, piece.value.detach().reshape(-1)) for piece in engine.strategy.pieces]
    axis = engine.world.axis("world")
    gathered = axis.gather_objects(parts) if axis.size > 1 else [parts]
    places, numel = layout(engine)
    flat = torch.zeros(numel, dtype=parts[0][2].dtype if parts else gathered[0][0][2].dtype)
    for rank_parts in gathered:
        for name, start, value in rank_parts:
            flat[places[name] + start : places[name] + start + value.numel()] = value.cpu()
    return flat


def set_weights(engine: Engine, flat: Tensor) -> None:
    """Let every rank hold what `flat` says, and begin with a fresh optimizer. Collective."""
    places, _ = layout(engine)
    with torch.no_grad():
        for piece in engine.strategy.pieces:
            start = places[piece.name] + piece.part.start
            piece.value.copy_(flat[start : start + piece.numel].view(piece.value.shape))
        engine.strategy.publish()
    engine.update.optimizer.state.clear()


def layout(engine: Engine) -> tuple[dict[str, int], int]:
    """Where each trainable parameter begins in the flat vector, and the vector's length. The same under every plan."""
    places, offset = {}, 0
    shapes = {state.bucket.slots[i].name: state.bucket.slots[i].numel for state, i in engine.strategy.slots()}
    for name in sorted(shapes):
        places[name] = offset
        offset += shapes[name]
    return places, offset


class Client:
    """Trains one engine for whichever client's samples it is given."""

    def __init__(self, engine: Engine, local: Local) -> None:
        self.engine, self.local = engine, local
        self._corrections: list[Tensor] = []  # of each piece: added to the gradient of the mean loss
        self._anchors: list[Tensor] = []
        engine.before_update.append(self._correct)

    def run(self, task: Task, samples: Samples) -> Reply:
        """One round: from the global weights to this client's change of them. Collective."""
        engine, local, began = self.engine, self.local, time.perf_counter()
        set_weights(engine, task.weights)
        self._prepare(task, samples)
        axis = engine.world.axis("dp")
        seed = derive_seed(local.seed, "client", samples.client, task.number) % 2**31
        loader = Loader(samples.train, local.batch, dp_size=axis.size, dp_rank=axis.rank, seed=seed)
        num_steps, loss = local.epochs * loader.batches_per_epoch, 0.0
        for _ in range(num_steps):
            loss = engine.step(next(loader), trace=False).loss
        engine.strategy.settle()
        change = get_weights(engine) - task.weights
        extra = self._move_control(task, samples, change, num_steps)
        self._corrections, self._anchors = [], []
        metrics = {"train_loss": loss, "num_steps": float(num_steps), "seconds": time.perf_counter() - began}
        return Reply(samples.client, task.number, len(samples.train), change, metrics, extra)

    @torch.no_grad()
    def accuracy(self, weights: Tensor, test: Part) -> float:
        """The share of targets that are predicted right, unmasked ones only. Collective."""
        engine = self.engine
        set_weights(engine, weights)
        engine.model.eval()
        inputs, targets = test.batch(torch.arange(len(test)))
        dtype = next(engine.model.parameters()).dtype
        inputs = inputs.to(engine.world.device, dtype if inputs.is_floating_point() else inputs.dtype)
        engine.strategy.begin_forward()
        output = call(engine.model, inputs)
        engine.strategy.end_forward()
        right = (output.argmax(dim=-1).cpu() == targets) & (targets != -100)
        return float(right.sum() / (targets != -100).sum().clamp(min=1))

    def _prepare(self, task: Task, samples: Samples) -> None:
        pieces = self.engine.strategy.pieces
        if self.local.mu:
            self._anchors = [piece.value.detach().clone() for piece in pieces]
        if "control" in task.extra:
            if samples.control is None:
                samples.control = torch.zeros_like(task.weights)
            difference, (places, _) = task.extra["control"] - samples.control, layout(self.engine)
            starts = [places[piece.name] + piece.part.start for piece in pieces]
            self._corrections = [
                difference[start : start + piece.numel].view(piece.value.shape)
                for start, piece in zip(starts, pieces, strict=True)
            ]

    @torch.no_grad()
    def _correct(self, engine: Engine) -> None:
        """Add what FedProx and SCAFFOLD add to the mean gradient; gradients are sums here, divided afterwards."""
        scale = engine.gradient_divisor
        for index, piece in enumerate(engine.strategy.pieces):
            if piece.value.grad is None:
                continue
            if self._anchors:
                piece.value.grad.add_(piece.value - self._anchors[index], alpha=self.local.mu * scale)
            if self._corrections:
                piece.value.grad.add_(self._corrections[index], alpha=scale)

    def _move_control(self, task: Task, samples: Samples, change: Tensor, num_steps: int) -> dict[str, Tensor]:
        """SCAFFOLD's option II: c_i <- c_i - c - change / (steps x rate); what it moved by is sent."""
        if "control" not in task.extra or self.local.scaffold_lr is None:
            return {}
        moved = -task.extra["control"] - change / (num_steps * self.local.scaffold_lr)
        samples.control = moved if samples.control is None else samples.control + moved
        return {"control": moved}
