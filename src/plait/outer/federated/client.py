"""A client: an engine, the samples that never leave it, and what one round asks of them.

The engine may be parallel. Every rank of its world calls the same methods, and the whole vectors
are equal on all of them. One engine serves many simulated clients in turn. A client is its samples
and its small state (`Samples`), not a model. So a thousand clients take the memory of one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.datasets import Loader
from plait.engine.engine import Engine
from plait.engine.seeds import derive_seed
from plait.engine.state.shards import optimizer_shards
from plait.mesh import Shard
from plait.outer.federated.local_rules import RoundRate
from plait.outer.federated.messages import Reply, TrainTask, refusal
from plait.outer.federated.samples import Samples


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains: passes over its samples, batch size, FedProx's mu, SCAFFOLD's
    corrections (needs the rate).
    """

    epochs: int = 1
    batch: int = 16
    mu: float = 0.0
    scaffold_lr: float | None = None
    seed: int = 0

    def num_steps(self, num_samples: int) -> int:
        """The steps of a round for a client with so many samples."""
        return self.epochs * -(-num_samples // self.batch)


def get_weights(engine: Engine) -> Tensor:
    """All trainable parameters, end to end in the order of their names, flat (numel,) and whole on
    every rank. Collective.
    """
    engine.show_evaluated_weights()
    places, numel = layout(engine)
    shards = [(shard.name, shard.index(), shard.values) for shard in _shards(engine)]
    axis = engine.world.axis("world")
    gathered = axis.gather_objects(shards) if axis.size > 1 else [shards]
    flat = torch.zeros(numel, dtype=next(value.dtype for held in gathered for _, _, value in held))
    for name, index, value in (shard for held in gathered for shard in held):
        offset, size = places[name]
        flat[offset : offset + size][index] = value.cpu()
    return flat


def set_weights(engine: Engine, flat: Tensor) -> None:
    """Let every rank hold what `flat` (numel,) says, and begin with a fresh optimizer. Collective.

    It has no state, and its groups have their first numbers. Nor has the outer step of `local`.
    """
    with torch.no_grad():
        for piece, values in zip(engine.strategy.pieces, slices(engine, flat), strict=True):
            piece.value.copy_(values)
            for kept in engine.driver.extra_state(piece).values():
                kept.zero_()
        engine.strategy.publish()
        engine.driver.restart()
    update = engine.update
    update.optimizer.state.clear()
    for group in update.optimizer.param_groups:
        for param in group["params"][:1]:
            update.counts.take(param, {})


def slices(engine: Engine, flat: Tensor) -> list[Tensor]:
    """The parts of a flat vector (numel,) that belong to the pieces of this rank, in
    their shapes.
    """
    places, _ = layout(engine)
    found = []
    for piece, shard in zip(engine.strategy.pieces, _shards(engine), strict=True):
        offset, size = places[shard.name]
        found.append(flat[offset : offset + size][shard.index()].view(piece.value.shape))
    return found


def layout(engine: Engine) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, length) of each trainable parameter in the flat vector, and the vector's length;
    alike under every plan.
    """
    places = {}
    offset = 0
    for name in sorted(
        name for name, param in engine.model.named_parameters() if param.requires_grad
    ):
        size = math.prod(engine.holding.shapes[name])
        places[name] = (offset, size)
        offset += size
    return places, offset


def _shards(engine: Engine) -> list[Shard]:
    """The shards that this rank's optimizer updates."""
    return [shard for _, shard in optimizer_shards(engine.strategy, engine.holding)]


class Client:
    """Trains one engine for whichever client's samples it is given."""

    def __init__(self, engine: Engine, local: LocalOptions, rate: RoundRate) -> None:
        """Train `engine`, which was built with `rate` for its learning rate."""
        self.engine = engine
        self.local = local
        self._rate = rate
        self._corrections: list[
            Tensor
        ] = []  # of each piece: added to the gradient of the mean loss
        self._anchors: list[Tensor] = []
        self._buffers = {name: value.clone() for name, value in engine.model.named_buffers()}
        self._scale = engine.scale_state()

    def run(
        self, task: TrainTask, samples: Samples, after_step: Callable[[], None] = lambda: None
    ) -> Reply:
        """One round: from the global weights to this client's change of them. Collective.

        Steps are counted as if the client had taken part in all rounds and had an engine of its
        own. So what is drawn in them, as by dropout, depends on no other client. Neither do
        buffers, which are those of the new model, and the loss scale, which is the client's own.
        """
        engine = self.engine
        local = self.local
        began = time.perf_counter()
        self._rate.begin(task.number)
        set_weights(engine, task.weights)
        num_steps = local.num_steps(len(samples.train))
        scale = self._scale if samples.kept.scale is None else samples.kept.scale
        engine.resume({"step": (task.number - 1) * num_steps, **scale})
        self._renew_buffers()
        self._prepare(task, samples)
        axis = engine.world.axis("dp")
        seed = derive_seed(local.seed, "client", samples.client, task.number) % 2**31
        loader = Loader(samples.train, local.batch, dp_size=axis.size, dp_rank=axis.rank, seed=seed)
        loss = 0.0
        for _ in range(num_steps):
            loss = engine.step(next(loader), trace=False).loss
            after_step()
        engine.flush()
        engine.driver.synchronize()
        samples.kept = replace(samples.kept, scale=engine.scale_state())
        change = get_weights(engine) - task.weights
        moved = self._control_change(task, change, num_steps)
        self._corrections = []
        self._anchors = []
        metrics = {
            "train_loss": loss,
            "num_steps": float(num_steps),
            "seconds": time.perf_counter() - began,
        }
        reply = Reply(samples.client, task.number, len(samples.train), change, metrics, moved)
        if moved and refusal(reply, task.weights.numel()) is None:
            own = samples.kept.control
            control = moved["control"] if own is None else own + moved["control"]
            samples.kept = replace(samples.kept, control=control)
        return reply

    @torch.no_grad()
    def _renew_buffers(self) -> None:
        """Give buffers, as the statistics of batch norm, the values of the new model."""
        for name, buffer in self.engine.model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])

    def _prepare(self, task: TrainTask, samples: Samples) -> None:
        pieces = self.engine.strategy.pieces
        changers = self.engine.before_norm
        changers.clear()
        if self.local.mu or "control" in task.extra:  # also on a rank without pieces
            changers.append(self._correct)
        if self.local.mu:
            self._anchors = [piece.value.detach().clone() for piece in pieces]
        if "control" in task.extra:
            own = samples.kept.control
            correction = task.extra["control"] if own is None else task.extra["control"] - own
            self._corrections = slices(self.engine, correction)

    @torch.no_grad()
    def _correct(self) -> None:
        """Add what FedProx and SCAFFOLD add to the mean gradient of every parameter, used or not.

        Gradients are divided afterwards.
        """
        scale = self.engine.gradient_divisor
        for index, piece in enumerate(self.engine.strategy.pieces):
            if piece.value.grad is None:
                piece.value.grad = torch.zeros_like(piece.value)
            if self._anchors:
                piece.value.grad.add_(
                    piece.value - self._anchors[index], alpha=self.local.mu * scale
                )
            if self._corrections:
                piece.value.grad.add_(self._corrections[index], alpha=scale)

    def _control_change(self, task: TrainTask, change: Tensor, num_steps: int) -> dict[str, Tensor]:
        """SCAFFOLD's option II: c_i <- c_i - c - change / (steps x rate); what it moves by is
        sent. A reply that the server refuses moves nothing.
        """
        if "control" not in task.extra or self.local.scaffold_lr is None:
            return {}
        rate = self.local.scaffold_lr * self._rate.factor
        return {"control": -task.extra["control"] - change / (num_steps * rate)}
