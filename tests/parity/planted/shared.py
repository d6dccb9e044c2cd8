"""Faults in code that both sides of a proof could run: the loader, the loss, the schedule, the
optimizers, experts, routers, adapters. One device must have its own of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from plait.datasets import order
from plait.datasets.loader import Loader
from plait.engine import recompute, update
from plait.engine.state import saving
from plait.models import adapters, gated, losses, permute
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router
from plait.parallel.data.zero3 import Zero3
from plait.parallel.expert import dispatch
from plait.parallel.expert.router_context import RankRouterContext
from plait.run import optimizers
from tests.parity.faults import wrap
from tests.parity.planted.entry import ONE_DEVICE, Entry

# -- data, loss and rate
# --------------------------------------------------------------------------------------------------


def warms_up_longer() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda train: original(train.model_copy(update={"warmup_steps": 4}))

    return [wrap(optimizers, "learning_rate", make)]


def one_order_for_all_epochs() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda self, epoch, start, stop: original(self, 0, start, stop)

    return [wrap(order.Shuffled, "at", make)]


def short_batch_left_out() -> list[Any]:
    def make(original: Any) -> Any:
        def after(self: Any, epoch: int, position: int) -> Any:
            if position + self.global_batch > self._order.num_samples:
                position = self._order.num_samples
            return original(self, epoch, position)

        return after

    return [wrap(Loader, "_after", make)]


def every_target_counts() -> list[Any]:
    def make(original: Any) -> Any:
        def counted(logits: Any, targets: Any) -> Any:
            total, count = original(logits, targets)
            return total, count - count + targets.numel()

        return counted

    return [wrap(losses, "cross_entropy", make)]


def large_logits() -> list[Any]:
    """Where logits are taken by groups of rows, the gradient of the first group is lost."""

    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            made, *rest = original(ctx, *grads)
            made[: ctx.step] = 0.0
            return made, *rest

        return staticmethod(backward)

    return [wrap(losses._CrossEntropyByRows, "backward", make)]


# -- optimizers
# --------------------------------------------------------------------------------------------------


def nothing_is_spared() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda name, train: original(name, train.model_copy(update={"no_decay": ()}))

    return [wrap(optimizers, "settings_of", make)]


def muon_without_nesterov() -> list[Any]:
    def make(original: Any) -> Any:
        def momentum(self: Any, param: Any, factor: float) -> Any:
            original(self, param, factor)
            return self.state[param]["momentum_buffer"].bfloat16()

        return momentum

    return [wrap(optimizers.OrthogonalMomentum, "_momentum", make)]


def muon_at_another_rate() -> list[Any]:
    return [patch.object(optimizers, "RMS_OF_ADAMW", 0.3)]


def clips_with_another_epsilon() -> list[Any]:
    return [patch.object(update, "CLIP_EPSILON", 1e-3)]


# -- experts and adapters
# --------------------------------------------------------------------------------------------------


def scaled_gradient(owner: Any, place: int, factor: float) -> Callable[[], list[Any]]:
    """One of the gradients of a hand-written backward, times a factor."""

    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            found = list(original(ctx, *grads))
            found[place] = found[place] * factor
            return tuple(found)

        return staticmethod(backward)

    return lambda: [wrap(owner, "backward", make)]


def one_row_of_each_token() -> list[Any]:
    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            pairs = grads[0].index_select(0, ctx.back)
            return pairs.view(ctx.num_tokens, -1, pairs.shape[1])[:, 0], None, None

        return staticmethod(backward)

    return [wrap(permute._ToRows, "backward", make)]


def balance_times_three() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda self, *args: 3.0 * original(self, *args)

    return [wrap(Router, "_balance", make)]


def one_token_too_many() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda self, positions: original(self, positions) + 1

    return [wrap(RouterSettings, "capacity", make)]


def auxiliary_loss_of_micro_batches() -> list[Any]:
    """The auxiliary loss is divided by the micro-batches, and not by their samples."""

    def make(original: Any) -> Any:
        def attach(self: Any, output: Any, auxiliary: Any) -> Any:
            if auxiliary is not None:
                auxiliary = auxiliary * sum(self._samples) / len(self._samples)
            return original(self, output, auxiliary)

        return attach

    return [wrap(RankRouterContext, "attach", make)]


def rows_come_home_in_the_wrong_order() -> list[Any]:
    def combine(self: Any, rows: Any) -> Any:
        return self._route.undo(permute.permute(rows, self._sorted, self._back))

    return [patch.object(dispatch._RankDispatch, "combine", combine)]


def scale_of_an_adapter() -> list[Any]:
    def make(original: Any) -> Any:
        def add_delta(module: Any, *args: Any) -> Any:
            wrong = replace(module.adapter, scale=float(module.adapter.rank))
            with patch.object(module, "adapter", wrong):
                return original(module, *args)

        return add_delta

    return [wrap(adapters, "add_delta", make)]


# -- memory and checkpoints
# --------------------------------------------------------------------------------------------------


def frozen_shards_halved() -> list[Any]:
    def make(original: Any) -> Any:
        def load(self: Any, state: Any, index: int, value: Any) -> None:
            is_frozen = any(state is one for one in self.frozen_states)
            wrong = is_frozen and self.group.shard.rank
            original(self, state, index, value * 0.5 if wrong else value)

        return load

    return [wrap(Zero3, "load", make)]


def blocks_recompute_apart() -> list[Any]:
    """A block that recomputes cuts its inputs from the graph."""

    def make(original: Any) -> Any:
        def checkpointed(*args: Any) -> Any:
            inner = original(*args)
            return lambda x, *rest, **keys: inner(x.detach() + 0.0 * x, *rest, **keys)

        return checkpointed

    return [wrap(recompute, "_checkpointed", make)]


def state_of_biases_is_lost() -> list[Any]:
    def make(original: Any) -> Any:
        def load(state: Any, checkpoint: Any, piece: Any, shard: Any) -> None:
            if not piece.name.endswith("bias"):
                original(state, checkpoint, piece, shard)

        return load

    return [wrap(saving, "_load_optimizer_state", make)]


MOE: dict[str, Any] = {"model": "experts"}
BALANCE: dict[str, Any] = {**MOE, "model_keys": {"router_aux_loss_coef": 0.1}}
FULL: dict[str, Any] = {**MOE, "model_keys": {"capacity_factor": 0.9}}
LORA: dict[str, Any] = {"model_keys": {"adapter": {"kind": "lora", "rank": 4, "alpha": 12}}}
MUON: dict[str, Any] = {"probe": "adamw", "keys": {"optimizer": "muon"}}
SPARED: dict[str, Any] = {"keys": {"no_decay": ["norm", "bias"]}}
SAMPLES: dict[str, Any] = {"probe": "last-batch", "steps": 3}
ENTRIES = [
    Entry("warms up longer", "dp2", "learning-rate", "lr", warms_up_longer, probe="schedule"),
    Entry("one order for all epochs", "dp2", "samples", "dp", one_order_for_all_epochs, **SAMPLES),
    Entry("the short batch left out", "dp2", "samples", "dp", short_batch_left_out, **SAMPLES),
    Entry(
        "every target counts", "dp2", "count", "data", every_target_counts, probe="uneven-tokens"
    ),
    Entry("a group of large logits", "dp2", "loss", ONE_DEVICE, large_logits, probe="thresholds"),
    Entry("nothing is spared", "dp2", "weight-decay", "optimizer", nothing_is_spared, **SPARED),
    Entry("muon without Nesterov", "dp2", "update", "optimizer", muon_without_nesterov, **MUON),
    Entry("muon at another rate", "dp2:zero1", "update", "optimizer", muon_at_another_rate, **MUON),
    Entry(
        "another epsilon of clipping",
        "dp2",
        "clip",
        "clip",
        clips_with_another_epsilon,
        probe="clipping",
    ),
    Entry(
        "backward of an expert",
        "mb2",
        "module",
        ONE_DEVICE,
        scaled_gradient(gated._ByChunk, 2, 0.8),
        module="experts",
        **MOE,
    ),
    Entry(
        "gradients of one row",
        "mb2",
        "module",
        ONE_DEVICE,
        one_row_of_each_token,
        module="blocks",
        **MOE,
    ),
    Entry(
        "gradients of weights of experts",
        "dp2 ep2",
        "module",
        ONE_DEVICE,
        scaled_gradient(permute._AddUp, 1, 0.5),
        module="mlp",
        **MOE,
    ),
    Entry(
        "balance times three", "dp2", "auxiliary-loss", "experts", balance_times_three, **BALANCE
    ),
    Entry(
        "one token too many", "dp2", "module", ONE_DEVICE, one_token_too_many, module="mlp", **FULL
    ),
    Entry(
        "auxiliary loss by micro-batches",
        "dp2 mb2",
        "auxiliary-loss",
        "experts",
        auxiliary_loss_of_micro_batches,
        **BALANCE,
    ),
    Entry(
        "rows come home in the wrong order",
        "dp2 ep2",
        "module",
        "ep",
        rows_come_home_in_the_wrong_order,
        module="mlp",
        **MOE,
    ),
    Entry("scale of an adapter", "dp2", "scale", ONE_DEVICE, scale_of_an_adapter, **LORA),
    Entry(
        "frozen shards are halved",
        "dp2:zero3",
        "init",
        "init",
        frozen_shards_halved,
        probe="frozen-unused",
    ),
    Entry(
        "blocks recompute apart",
        "remat:full",
        "module",
        "remat",
        blocks_recompute_apart,
        module="blocks",
    ),
    Entry(
        "state of biases is lost",
        "dp2:zero1",
        "resume-optimizer",
        "resume",
        state_of_biases_is_lost,
        how="resume",
    ),
]
