"""Faults that real frameworks have had, planted one at a time in a rank: each is a patch and how `verify` must name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from plait.data import gradients, replicated, server, shards, strategy, zero, zero3
from plait.datasets import Loader
from plait.engine import build, engine, init, loss, update

Patches = Callable[[], list[Any]]


@dataclass(frozen=True)
class Mutation:
    """A fault: where it shows (plan, probe), what it is called (`cause`), and the axis or option to blame.

    `blamed` is what the smaller plans say: the axes without which the fault does not show; empty when one device has it.
    """

    name: str
    plan: str
    probe: str
    cause: str
    axis: str
    blamed: tuple[str, ...]
    patches: Patches
    model: str = "gpt"

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self.patches():
                stack.enter_context(one)
            yield


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


# -- reductions ---------------------------------------------------------------------------------------------------


def no_all_reduce() -> list[Any]:
    return [patch.object(replicated, "native_all_reduce", lambda axis, flat, padding: Done())]


def reduce_twice() -> list[Any]:
    def twice(axis: Any, flat: Any, padding: int) -> Any:
        axis.all_reduce(flat).wait()
        return axis.all_reduce(flat)

    return [patch.object(replicated, "native_all_reduce", twice)]


def no_reduce_scatter() -> list[Any]:
    def launch(self: Any, state: Any) -> None:
        self._works[state.index] = Done()

    def finish(self: Any) -> None:
        self._works.clear()

    return [patch.object(shards.ShardedGradients, "launch", launch), patch.object(shards.ShardedGradients, "finish", finish)]


def last_bucket_skipped() -> list[Any]:
    def make(original: Any) -> Any:
        def launch(self: Any, state: Any) -> None:
            if state.index < len(self.states) - 1:
                original(self, state)

        return launch

    return [wrap(replicated.Replicated, "_launch", make)]


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


# -- normalisation ------------------------------------------------------------------------------------------------


def mean_of_micro_batches() -> list[Any]:
    def make(original: Any) -> Any:
        def add(self: Any, value: Any, num_samples: int) -> Any:
            return original(self, value, num_samples) / value[1].clamp(min=1)

        return add

    def divisor(self: Any) -> float:
        return float(self._splitter.num_micro_batches)

    return [wrap(loss.LossSum, "add", make), patch.object(engine.Engine, "_divisor", divisor)]


def mean_of_ranks() -> list[Any]:
    return [wrap(engine.Engine, "__init__", after(lambda self: setattr(self, "_mean_of_workers", True)))]


def local_divisor() -> list[Any]:
    return [patch.object(engine.Engine, "_divisor", lambda self: float(self._loss.count))]


def micro_batches_too_large() -> list[Any]:
    return [patch.object(engine.Engine, "_divisor", lambda self: self._totals.count / self._splitter.num_micro_batches)]


def masked_counted() -> list[Any]:
    def make(original: Any) -> Any:
        def add(self: Any, value: Any, num_samples: int) -> Any:
            return original(self, (value[0], value[1] + 5), num_samples)

        return add

    return [wrap(loss.LossSum, "add", make)]


def loss_times_ranks() -> list[Any]:
    def make(original: Any) -> Any:
        def totals(self: Any, *args: Any) -> Any:
            found = original(self, *args)
            return _LossTimesTwo(found.loss_sum, found.count, found.squared_norm)

        return totals

    return [wrap(update.Update, "totals", make)]


class _LossTimesTwo(loss.LossTotals):
    @property
    def loss(self) -> float:
        return 2 * self.loss_sum / self.count


# -- micro-batches and samples ------------------------------------------------------------------------------------


def micro_batch_dropped() -> list[Any]:
    def make(original: Any) -> Any:
        def backward(self: Any, action: Any) -> None:
            if action.micro_batch == 1:
                self._losses[1] = self._losses[1] * 0.0
            original(self, action)

        return backward

    return [wrap(engine.Engine, "_backward", make)]


def only_the_last_micro_batch() -> list[Any]:
    def take(self: Any, state: Any, index: int, param: Any) -> None:
        grad, param.grad = param.grad, None
        state.fresh.discard(index)
        state.views[index].copy_(grad)

    return [patch.object(gradients.PersistentGradients, "take", take)]


def later_micro_batches_twice() -> list[Any]:
    def take(self: Any, state: Any, index: int, param: Any) -> None:
        grad, param.grad = param.grad, None
        if index in state.fresh:
            state.fresh.discard(index)
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
    return [patch.object(engine, "derive_seed", lambda *words: init.derive_seed(*words[:-1], 0))]


# -- norm and clipping --------------------------------------------------------------------------------------------


def norm_counts_replicas() -> list[Any]:
    return [
        patch.object(replicated.Replicated, "squared_norm", strategy.DataStrategy.squared_norm),
        _one_replica(replicated.Replicated),
    ]


def norm_counts_replicated_shards() -> list[Any]:
    def whole(self: Any) -> Any:
        grads = (piece.value.grad for piece in self.pieces if piece.value.grad is not None)
        return strategy.squared_norm(grads, self.group.device)

    return [patch.object(strategy.DataStrategy, "squared_norm", whole)]


def _one_replica(owner: Any) -> Any:
    return patch.object(owner, "replicas", property(lambda self: strategy.Replicas(1, 0)))


def norm_of_own_shard() -> list[Any]:
    def make(original: Any) -> Any:
        def totals(self: Any, *args: Any) -> Any:
            own = float(self._strategy.squared_norm())
            found = original(self, *args)
            return loss.LossTotals(found.loss_sum, found.count, own)

        return totals

    return [wrap(update.Update, "totals", make)]


def never_clips() -> list[Any]:
    return [wrap(update.Update, "__init__", after(lambda self: setattr(self, "_clip", None)))]


# -- start, update, state -----------------------------------------------------------------------------------------


def wrong_seed() -> list[Any]:
    return [patch.object(build, "Initializer", lambda model, seed, *rest: init.Initializer(model, seed + 1, *rest))]


def seed_of_the_rank() -> list[Any]:
    def make(model: Any, seed: int, *rest: Any) -> Any:
        return init.Initializer(model, seed + torch.distributed.get_rank(), *rest)

    return [patch.object(build, "Initializer", make)]


def update_twice() -> list[Any]:
    return [wrap(update.Update, "apply", after(lambda self: self.optimizer.step()))]


def rate_of_the_next_step() -> list[Any]:
    def make(original: Any) -> Any:
        def apply(self: Any, totals: Any, step: int, *rest: Any) -> None:
            original(self, totals, step + 1, *rest)

        return apply

    return [wrap(update.Update, "apply", make)]


def gradients_kept() -> list[Any]:
    return [patch.object(gradients.PersistentGradients, "begin", lambda self, states: None)]


def no_weight_decay() -> list[Any]:
    def make(original: Any) -> Any:
        def made(*args: Any) -> Any:
            optimizer = original(*args)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            return optimizer

        return made

    return [wrap(update, "make", make)]


def moments_of_another_shard() -> list[Any]:
    def roll(self: Any) -> None:
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].copy_(state["exp_avg"].roll(1))

    return [wrap(update.Update, "apply", after(roll))]


def frozen_moves() -> list[Any]:
    def decay(self: Any) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(0.99)

    return [wrap(engine.Engine, "step", after(decay))]


def unused_decays() -> list[Any]:
    return [patch.object(strategy.DataStrategy, "forget_untouched", lambda self, touched: None)]


def untied() -> list[Any]:
    """The engine makes two weights of a tied one."""

    def place(model: Any, dtype: Any, device: Any) -> None:
        init.place_holders(model, dtype, device)
        model.head.weight = torch.nn.Parameter(model.head.weight.data)

    def start_alike(self: Any) -> None:
        self.model.head.weight.data.copy_(self.model.embed.weight.data)

    return [patch.object(build, "place_holders", place), wrap(engine.Engine, "__init__", after(start_alike))]


# -- what ranks see after the update ------------------------------------------------------------------------------


def replicas_drift() -> list[Any]:
    def drift(self: Any) -> None:
        if self.group.axis.rank == 1 and self.pieces[0].value.grad is not None:
            self._flats[0][0] += 1e-6

    return [wrap(replicated.Replicated, "publish", after(drift))]


def gathers_too_little() -> list[Any]:
    def make(original: Any) -> Any:
        def publish(self: Any) -> None:
            if getattr(self, "_published", False):
                self._flats, kept = self._flats[1:], self._flats
                self.states, states = self.states[1:], self.states
                original(self)
                self._flats, self.states = kept, states
            else:
                self._published = True
                original(self)

        return publish

    return [wrap(zero.ShardedUpdate, "publish", make)]


def stale_gather() -> list[Any]:
    """Every unit is used as it was one update ago."""

    def make(original: Any) -> Any:
        def publish(self: Any) -> None:
            for bucket in self._gathered:
                bucket.late = bucket.shard.clone()
            original(self)

        return publish

    def late(original: Any) -> Any:
        def prefetch(self: Any) -> None:
            old = getattr(self, "late", None)
            if old is None or self.whole or self._work is not None:
                return original(self)
            current = self.shard.clone()
            self.shard.copy_(old)
            self._axis.barrier()
            original(self)
            self._work.wait()
            self._axis.barrier()
            self.shard.copy_(current)
            return None

        return prefetch

    return [wrap(zero3.GatheredBucket, "prefetch", late), wrap(zero3.Zero3, "reduce", make)]


DP = ("dp",)
MUTATIONS = [
    Mutation("no all-reduce", "dp2", "sgd", "missing-reduction", "dp", DP, no_all_reduce),
    Mutation("reduced twice", "dp2", "sgd", "scale", "dp", DP, reduce_twice),
    Mutation("no reduce-scatter", "dp2:zero1", "sgd", "missing-reduction", "dp", DP, no_reduce_scatter),
    Mutation("no reduce-scatter, ZeRO-3", "dp2:zero3", "adamw", "missing-reduction", "dp", DP, no_reduce_scatter),
    Mutation("last bucket skipped", "dp2", "sgd", "missing-reduction", "dp", DP, last_bucket_skipped),
    Mutation("half a ring", "dp2:ring", "sgd", "missing-reduction", "dp", DP, half_a_ring),
    Mutation("a push lost", "dp4:server", "sgd", "dropped", "dp", DP, a_push_lost),
    Mutation("replicas of shards not summed", "dp4:zero3,replicate2", "sgd", "dropped", "dp", DP, replicas_not_summed),
    Mutation("scaled before the sum", "dp2", "clipping", "factor-by-dp", "dp", DP, scaled_by_rank),
    Mutation("mean of means over micro-batches", "mb3", "uneven-tokens", "mean-of-means", "mb", ("mb",), mean_of_micro_batches),
    Mutation("mean of means over ranks", "dp2:server", "uneven-tokens", "mean-of-means", "dp", DP, mean_of_ranks),
    Mutation("local divisor", "dp2", "sgd", "scale", "dp", DP, local_divisor),
    Mutation("times the micro-batches", "dp2 mb3", "sgd", "scale", "mb", ("mb",), micro_batches_too_large),
    Mutation("masked tokens counted", "dp2", "uneven-tokens", "count", "data", (), masked_counted),
    Mutation("reported loss", "dp2", "sgd", "loss-report", "dp", (), loss_times_ranks),
    Mutation("a micro-batch dropped", "dp2 mb3", "sgd", "dropped", "mb", ("mb",), micro_batch_dropped),
    Mutation("only the last micro-batch", "dp2:zero1 mb3", "sgd", "dropped", "mb", ("mb",), only_the_last_micro_batch),
    Mutation("later micro-batches twice", "dp2 mb3", "sgd", "doubled", "mb", ("mb",), later_micro_batches_twice),
    Mutation("remainder dropped", "dp2", "last-batch", "count", "data", DP, remainder_dropped),
    Mutation("same data on all ranks", "dp2", "sgd", "", "dp", DP, same_data_on_all_ranks),
    Mutation("same dropout everywhere", "dp2 mb2", "dropout", "", "dp", DP, same_dropout_everywhere),
    Mutation("norm counts replicas", "dp2", "clipping", "norm", "dp", DP, norm_counts_replicas),
    Mutation(
        "norm counts replicated shards", "dp4:zero1,replicate2", "clipping", "norm", "dp", DP, norm_counts_replicated_shards
    ),
    Mutation("norm of its own shard", "dp2:zero2", "clipping", "", "dp", DP, norm_of_own_shard),
    Mutation("never clips", "dp2", "clipping", "clip", "clip", (), never_clips),
    Mutation("wrong seed", "dp2:zero3", "sgd", "init", "init", (), wrong_seed),
    Mutation("the rank's seed", "dp2", "sgd", "init", "init", DP, seed_of_the_rank),
    Mutation("update twice", "dp2", "sgd", "learning-rate", "lr", (), update_twice),
    Mutation("rate of the next step", "dp2", "schedule", "learning-rate", "lr", (), rate_of_the_next_step),
    Mutation("gradients kept", "dp2", "sgd", "gradient-kept", "optimizer", (), gradients_kept),
    Mutation("no weight decay", "dp2", "sgd", "weight-decay", "optimizer", (), no_weight_decay),
    Mutation("moments mixed", "dp2:zero1", "adamw", "optimizer-state", "optimizer", (), moments_of_another_shard),
    Mutation("frozen moves", "dp2", "frozen-unused", "frozen-moved", "optimizer", (), frozen_moves),
    Mutation("unused decays", "dp2:zero1", "frozen-unused", "frozen-moved", "optimizer", (), unused_decays),
    Mutation("untied", "dp2", "tied", "tied", "tied", (), untied),
    Mutation("replicas drift", "dp2", "sgd", "replicas", "dp", DP, replicas_drift),
    Mutation("a bucket is not gathered", "dp2:zero1", "sgd", "replicas", "dp", DP, gathers_too_little),
    Mutation("stale gather", "dp2:zero3", "sgd", "stale-weights", "dp", DP, stale_gather),
]
BY_NAME = {one.name: one for one in MUTATIONS}
