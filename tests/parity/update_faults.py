"""More faults, of the start, the update, the optimizer's state, and of what ranks see after the
update.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from plait.engine import build, engine, update
from plait.engine.state import init, values
from plait.parallel.data import gradients, replicated, zero, zero3
from tests.parity.faults import after, wrap

# -- start, update, state
# -----------------------------------------------------------------------------------------


def wrong_seed() -> list[Any]:
    def make(model: Any, seed: int, *rest: Any, **keys: Any) -> Any:
        return init.Initializer(model, seed + 1, *rest, **keys)

    return [patch.object(values, "Initializer", make)]


def seed_of_the_rank() -> list[Any]:
    def make(model: Any, seed: int, *rest: Any, **keys: Any) -> Any:
        return init.Initializer(model, seed + torch.distributed.get_rank(), *rest, **keys)

    return [patch.object(values, "Initializer", make)]


def update_twice() -> list[Any]:
    def again(self: Any) -> None:
        with self._by_hand.opened():
            self.optimizer.step()

    return [wrap(update.Update, "make", after(again))]


def rate_of_the_next_step() -> list[Any]:
    def make(original: Any) -> Any:
        def change(self: Any, totals: Any, step: int, divisor: float) -> Any:
            return original(self, totals, step + 1, divisor)

        return change

    return [wrap(update.Update, "change", make)]


def gradients_kept() -> list[Any]:
    return [patch.object(gradients.PersistentGradients, "begin_step", lambda self, states: None)]


def no_weight_decay() -> list[Any]:
    def make(original: Any) -> Any:
        def made(*args: Any) -> Any:
            optimizer = original(*args)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            return optimizer

        return made

    return [wrap(update, "made_optimizer", make)]


def moments_of_another_shard() -> list[Any]:
    def roll(self: Any) -> None:
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].copy_(state["exp_avg"].roll(1))

    return [wrap(update.Update, "make", after(roll))]


def frozen_moves() -> list[Any]:
    def decay(self: Any) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(0.99)

    return [wrap(engine.Engine, "step", after(decay))]


def unused_decays() -> list[Any]:
    return [patch.object(update.Update, "_drop_gradients", lambda self, unused: None)]


def untied() -> list[Any]:
    """The engine makes two weights of a tied one."""

    def make(original: Any) -> Any:
        def blocks(model: Any, pattern: Any) -> Any:
            model.head.weight = torch.nn.Parameter(torch.empty_like(model.head.weight))
            return original(model, pattern)

        return blocks

    def start_alike(self: Any) -> None:
        self.model.head.weight.data.copy_(self.model.embed.weight.data)

    return [wrap(build, "block_names", make), wrap(engine.Engine, "__init__", after(start_alike))]


# -- what ranks see after the update
# ------------------------------------------------------------------------------


def replicas_drift() -> list[Any]:
    def drift(self: Any) -> None:
        if self.group.axis.rank == 1 and self.pieces[0].value.grad is not None:
            self._flats[0][0] += 1e-6

    return [wrap(replicated.ReplicatedParameters, "publish", after(drift))]


def gathers_too_little() -> list[Any]:
    def make(original: Any) -> Any:
        def publish(self: Any) -> None:
            if getattr(self, "_published", False):
                self._flats, kept = self._flats[1:], self._flats
                self.states, states = self.states[1:], self.states
                original(self)
                self._flats = kept
                self.states = states
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
        def gather(self: Any) -> None:
            old = getattr(self, "late", None)
            if old is None:
                return original(self)
            current = self.shard.clone()
            self.shard.copy_(old)
            self._axis.barrier()
            original(self)
            self._work.wait()
            self._axis.barrier()
            self.shard.copy_(current)
            return None

        return gather

    return [wrap(zero3.GatheredBucket, "gather", late), wrap(zero3.Zero3, "reduce", make)]


# -- the precision of training
# ------------------------------------------------------------------------------------


def fused_update_decays_less() -> list[Any]:
    """Only where the optimizer's fused kernel takes a scale, as it does in float32."""

    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            for group in self.optimizer.param_groups:
                if self._takes_scale:
                    group["weight_decay"] = 0.0
            original(self, change)

        return step

    return [wrap(update.Update, "make", make)]


def masters_in_bf16() -> list[Any]:
    """Masters take over the rounding of the weights that are computed with."""

    def take_over(self: Any) -> None:
        for flat, master in zip(self._flats, self._masters, strict=True):
            master.copy_(flat)

    return [wrap(replicated.ReplicatedParameters, "publish", after(take_over))]
