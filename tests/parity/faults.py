"""Faults that real frameworks have had, as patches of this one: each function returns the patches
of one fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from plait.datasets import Loader
from plait.engine import loss, step_update, training_step, update
from plait.engine.state import init
from plait.parallel.data import gradients, replicated, server, shards, strategy


class Done:
    """A communication that never was."""

    def advance(self) -> None: ...

    def wait(self) -> None: ...


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return patch.object(owner, name, make(getattr(owner, name)))


def after(action: Callable[..., None]) -> Callable[[Any], Any]:
    """Do what was done, then `action(self)` too."""

    def make(original: Any) -> Any:
        def replaced(self: Any, *args: Any, **keys: Any) -> Any:
            result = original(self, *args, **keys)
            action(self)
            return result

        return replaced

    return make


# -- reductions
# --------------------------------------------------------------------------------------------------


def no_all_reduce() -> list[Any]:
    return [patch.object(replicated, "native_all_reduce", lambda axis, flat, padding: Done())]


def reduce_twice() -> list[Any]:
    def twice(axis: Any, flat: Any, padding: int) -> Any:
        axis.all_reduce(flat).wait()
        return axis.all_reduce(flat)

    return [patch.object(replicated, "native_all_reduce", twice)]


def no_reduce_scatter() -> list[Any]:
    """Each rank keeps its own gradients of its shard, unsummed."""

    def launch(self: Any, state: Any) -> None:
        axis = self._group.shard
        own = state.grad.view(axis.size, -1)[axis.rank]
        self._shard(state)[state.start : state.start + own.numel()].copy_(own)
        self._works[state.index, state.start] = Done()

    def finish(self: Any) -> None:
        self._works.clear()

    return [
        patch.object(shards.ShardedGradients, "launch", launch),
        patch.object(shards.ShardedGradients, "finish", finish),
    ]


def last_bucket_skipped() -> list[Any]:
    def make(original: Any) -> Any:
        def launch(self: Any, state: Any) -> None:
            if state.index < len(self.states) - 1:
                original(self, state)

        return launch

    return [wrap(replicated.ReplicatedParameters, "_launch", make)]


def half_a_ring() -> list[Any]:
    def ring(axis: Any, flat: Any, padding: int) -> Any:
        return axis.all_reduce(flat[: flat.numel() // 2])

    return [patch.object(replicated, "ring_all_reduce", ring)]


def a_push_lost() -> list[Any]:
    def wait(self: Any) -> None:
        for pushed, receive in self._arriving[:-1]:
            receive.wait()
            self._grad.add_(pushed)
        for _, receive in self._arriving[-1:]:
            receive.wait()
        for send in self._sends:
            send.wait()

    return [patch.object(server._Push, "wait", wait)]


def replicas_not_summed() -> list[Any]:
    return [patch.object(shards.ShardedGradients, "_sum_replicas", lambda self, state: Done())]


def scaled_by_rank() -> list[Any]:
    """Each rank clips its own part before the sum."""

    def scale(axis: Any, flat: Any, padding: int) -> Any:
        flat.mul_(1 / (1 + axis.rank))
        return axis.all_reduce(flat)

    return [patch.object(replicated, "native_all_reduce", scale)]


# -- normalisation
# ------------------------------------------------------------------------------------------------


def _num_micro_batches(update: Any) -> int:
    return len(update._pipeline._step.micro_batches)


def mean_of_micro_batches() -> list[Any]:
    def make(original: Any) -> Any:
        def add(self: Any, value: Any, num_samples: int, tokens_per_sample: int = 1) -> Any:
            return original(self, value, num_samples) * self.divisor / value[1].clamp(min=1)

        return add

    def divisor(self: Any, totals: Any = None) -> float:
        return float(_num_micro_batches(self))

    step = step_update.StepUpdate
    return [wrap(loss.LossSum, "add", make), patch.object(step, "divisor", divisor)]


def mean_of_ranks() -> list[Any]:
    return [
        wrap(
            step_update.StepUpdate,
            "__init__",
            after(lambda self: setattr(self, "_mean_of_workers", True)),
        )
    ]


def local_divisor() -> list[Any]:
    return [
        patch.object(
            step_update.StepUpdate,
            "divisor",
            lambda self, totals=None: float(
                self._pipeline.loss.count / self._pipeline.loss.divisor
            ),
        )
    ]


def micro_batches_too_large() -> list[Any]:
    return [
        patch.object(
            step_update.StepUpdate,
            "divisor",
            lambda self, totals=None: self.totals.gradient_divisor / _num_micro_batches(self),
        )
    ]


def masked_counted() -> list[Any]:
    def make(original: Any) -> Any:
        def add(self: Any, value: Any, num_samples: int, tokens_per_sample: int = 1) -> Any:
            return original(self, (value[0], value[1] + 5), num_samples, tokens_per_sample)

        return add

    return [wrap(loss.LossSum, "add", make)]


def loss_times_ranks() -> list[Any]:
    def make(original: Any) -> Any:
        def totals(self: Any, *args: Any, **named: Any) -> Any:
            found = original(self, *args, **named)
            return replace(found, loss_sum=2 * found.loss_sum)

        return totals

    return [wrap(update.Update, "totals", make)]


# -- micro-batches and samples
# ------------------------------------------------------------------------------------


def micro_batch_dropped() -> list[Any]:
    """The loss counts every micro-batch; the gradient of the second is zero."""

    def start(self: Any) -> None:
        self.num_added = 0

    def make(original: Any) -> Any:
        def add(self: Any, *args: Any) -> Any:
            self.num_added += 1
            return original(self, *args) * (0.0 if self.num_added == 2 else 1.0)

        return add

    return [wrap(loss.LossSum, "reset", after(start)), wrap(loss.LossSum, "add", make)]


def only_the_last_micro_batch() -> list[Any]:
    def take(self: Any, state: Any, index: int, param: Any) -> None:
        grad = param.grad
        param.grad = None
        state.stale.discard(index)
        state.views[index].copy_(grad)

    return [patch.object(gradients.PersistentGradients, "take", take)]


def later_micro_batches_twice() -> list[Any]:
    def take(self: Any, state: Any, index: int, param: Any) -> None:
        grad = param.grad
        param.grad = None
        if index in state.stale:
            state.stale.discard(index)
            state.views[index].copy_(grad)
        else:
            state.views[index].add_(grad, alpha=2)

    return [patch.object(gradients.PersistentGradients, "take", take)]


def remainder_dropped() -> list[Any]:
    def make(original: Any) -> Any:
        def following(self: Any) -> Any:
            inputs, targets = original(self)
            if self.dp_size > 1:
                even = inputs.shape[0] // 2 * 2
                return inputs[:even], targets[:even]
            return inputs, targets

        return following

    return [wrap(Loader, "__next__", make)]


def same_data_on_all_ranks() -> list[Any]:
    def make(original: Any) -> Any:
        def start(self: Any, *args: Any, dp_size: int = 1, dp_rank: int = 0, **keys: Any) -> None:
            original(self, *args, dp_size=dp_size, dp_rank=0, **keys)

        return start

    return [wrap(Loader, "__init__", make)]


def same_dropout_everywhere() -> list[Any]:
    def seed(*words: Any) -> int:
        return init.derive_seed(*words[:-1], 0)

    return [patch.object(training_step, "derive_seed", seed)]


# -- norm and clipping
# --------------------------------------------------------------------------------------------


def norm_counts_replicas() -> list[Any]:
    return [
        patch.object(
            replicated.ReplicatedParameters, "squared_norm", strategy.DataStrategy.squared_norm
        ),
        _one_replica(replicated.ReplicatedParameters),
    ]


def norm_counts_replicated_shards() -> list[Any]:
    def whole(self: Any, weight: Any = None) -> Any:
        grads = (piece.value.grad for piece in self.pieces if piece.value.grad is not None)
        return strategy.squared_norm(grads, self.group.device)

    return [patch.object(strategy.DataStrategy, "squared_norm", whole)]


def _one_replica(owner: Any) -> Any:
    return patch.object(owner, "replicas", property(lambda self: strategy.Replicas(1, 0)))


def norm_of_own_shard() -> list[Any]:
    def make(original: Any) -> Any:
        def totals(self: Any, *args: Any, **named: Any) -> Any:
            own = float(self._strategy.squared_norm())
            found = original(self, *args, **named)
            return replace(found, squared_norm=own)

        return totals

    return [wrap(update.Update, "totals", make)]


def never_clips() -> list[Any]:
    return [
        wrap(update.Update, "__init__", after(lambda self: setattr(self, "clip_grad_norm", None)))
    ]
