"""Faults of the update: its rule, its rate and schedule, its clipping, and its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from plait.engine import update
from plait.parallel.data import replicated
from tests.parity.faults import after, wrap
from tests.parity.planted.entry import Entry

# -- schedules
# --------------------------------------------------------------------------------------------------


def rate(change: Callable[[Any, int], float]) -> Callable[[], list[Any]]:
    """Another rate at a step: `change(the schedule, step)`."""

    def make(original: Any) -> Any:
        return lambda self, step: change(lambda other: original(self, other), step)

    return lambda: [wrap(update.Update, "rate", make)]


# -- the optimizer
# --------------------------------------------------------------------------------------------------


def made(action: Callable[[Any], None]) -> Callable[[], list[Any]]:
    """The engine's optimizer, changed when it is made."""

    def make(original: Any) -> Any:
        def other(*args: Any) -> Any:
            optimizer = original(*args)
            action(optimizer)
            return optimizer

        return other

    return lambda: [wrap(update, "made_optimizer", make)]


def option(**keys: Any) -> Callable[[], list[Any]]:
    def act(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(keys)

    return made(act)


def stepped(action: Callable[[Any], None]) -> Callable[[], list[Any]]:
    """`action(update)` after each update."""
    return lambda: [wrap(update.Update, "make", after(action))]


def _states(self: Any, action: Callable[[dict[str, Any]], None]) -> None:
    for kept in self.optimizer.state.values():
        action(kept)


def _forget(kept: dict[str, Any]) -> None:
    for value in kept.values():
        if isinstance(value, torch.Tensor):
            value.zero_()


def _rounded(kept: dict[str, Any]) -> None:
    kept["exp_avg"].copy_(kept["exp_avg"].bfloat16())


def _first_stays(self: Any) -> None:
    first = self._strategy.pieces[0].value
    if not hasattr(self, "_first"):
        self._first = first.detach().clone()
    first.data.copy_(self._first)


def first_stays() -> list[Any]:
    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            first = self._strategy.pieces[0].value
            kept = first.detach().clone()
            original(self, change)
            first.data.copy_(kept)

        return step

    return [wrap(update.Update, "make", make)]


def second_shard_stays() -> list[Any]:
    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            if self._strategy.group.axis.rank == 0:
                original(self, change)

        return step

    return [wrap(update.Update, "make", make)]


def decays_once_more(self: Any) -> None:
    for piece in self._strategy.pieces:
        piece.value.data.mul_(0.995)


def into_gradients() -> list[Any]:
    """Weight decay goes through the moments, as Adam's does and AdamW's does not."""

    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0
            for piece in self._strategy.pieces:
                if piece.value.grad is not None:
                    piece.value.grad.add_(piece.value.data, alpha=0.1 / change.factor)
            original(self, change)

        return step

    return [wrap(update.Update, "make", make)]


def gradients_of_the_step_before() -> list[Any]:
    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            pieces = [one for one in self._strategy.pieces if one.value.grad is not None]
            now = [one.value.grad * change.factor for one in pieces]
            if hasattr(self, "_late"):
                for one, late in zip(pieces, self._late, strict=True):
                    one.value.grad.copy_(late / change.factor)
            self._late = now
            original(self, change)

        return step

    return [wrap(update.Update, "make", make)]


def gradients_rounded(dtype: torch.dtype) -> Callable[[], list[Any]]:
    """Gradients pass through a lower precision before the update."""

    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            for piece in self._strategy.pieces:
                grad = piece.value.grad
                if grad is not None:
                    grad.copy_((grad * change.factor).to(dtype).to(grad.dtype) / change.factor)
            original(self, change)

        return step

    return lambda: [wrap(update.Update, "make", make)]


def summed_in(dtype: torch.dtype) -> Callable[[], list[Any]]:
    """Gradients are sent in a lower precision."""

    def make(original: Any) -> Any:
        def reduce(axis: Any, flat: Any, padding: int) -> Any:
            flat.copy_(flat.to(dtype))
            return original(axis, flat, padding)

        return reduce

    return lambda: [wrap(replicated, "native_all_reduce", make)]


def weights_rounded(dtype: torch.dtype) -> Callable[[], list[Any]]:
    def act(self: Any) -> None:
        for piece in self._strategy.pieces:
            piece.value.data.copy_(piece.value.data.to(dtype))

    return stepped(act)


# -- clipping
# --------------------------------------------------------------------------------------------------


def changed(change: Callable[[Any, Any, Any, float], float]) -> Callable[[], list[Any]]:
    """Another factor: `change(update, the right change, totals, divisor)`."""

    def make(original: Any) -> Any:
        def other(self: Any, totals: Any, step: int, divisor: float) -> Any:
            right = original(self, totals, step, divisor)
            return replace(right, factor=change(self, right, totals, divisor))

        return other

    return lambda: [wrap(update.Update, "change", make)]


def clipped_apart(by_value: bool) -> Callable[[], list[Any]]:
    def make(original: Any) -> Any:
        def step(self: Any, change: Any) -> None:
            for piece in self._strategy.pieces:
                grad = piece.value.grad
                if grad is None:
                    continue
                grad.mul_(1 / self._count_)
                if by_value:
                    grad.clamp_(-0.001, 0.001)
                else:
                    grad.mul_(min(1.0, self.clip_grad_norm / float(grad.norm())))
            original(self, replace(change, factor=1.0))

        return step

    def count(original: Any) -> Any:
        def other(self: Any, totals: Any, step: int, divisor: float) -> Any:
            self._count_ = divisor
            return original(self, totals, step, divisor)

        return other

    return lambda: [wrap(update.Update, "make", make), wrap(update.Update, "change", count)]


def norm(change: Callable[[float], float]) -> Callable[[], list[Any]]:
    """Another squared norm."""

    def make(original: Any) -> Any:
        def totals(self: Any, *args: Any, **named: Any) -> Any:
            found = original(self, *args, **named)
            return replace(found, squared_norm=change(found.squared_norm))

        return totals

    return lambda: [wrap(update.Update, "totals", make)]


COSINE = {"probe": "schedule", "steps": 3}
CLIP = {"probe": "clipping"}
ADAM = {"probe": "adamw"}
TWO = {"steps": 2}
BF16 = torch.bfloat16
ENTRIES = [
    Entry("no schedule", "dp2", "learning-rate", "lr", rate(lambda s, t: 1.0), **COSINE),
    Entry(
        "a warm-up step late", "dp2", "learning-rate", "lr", rate(lambda s, t: s(t + 2)), **COSINE
    ),
    Entry("rate times ranks", "dp2", "updated-twice", "optimizer", option(lr=0.1)),
    Entry(
        "the wrong way",
        "dp2",
        "learning-rate",
        "lr",
        option(maximize=True),
        keys={"weight_decay": 1e-9},
    ),
    Entry("decays twice", "dp2", "weight-decay", "optimizer", stepped(decays_once_more)),
    Entry(
        "norms decay too",
        "dp2",
        "weight-decay",
        "optimizer",
        option(weight_decay=0.1),
        keys={"no_decay": ["norm", "bias"]},
    ),
    Entry("decay in the gradient", "dp2", "weight-decay", "optimizer", into_gradients, **ADAM),
    Entry(
        "betas change places",
        "dp2",
        "optimizer-state",
        "optimizer",
        option(betas=(0.95, 0.9)),
        **ADAM,
    ),
    Entry("another eps", "dp2", "update", "optimizer", option(eps=1e-2), **ADAM),
    Entry("momentum of Nesterov", "dp2", "update", "optimizer", option(nesterov=True)),
    Entry("no momentum", "dp2", "optimizer-state", "optimizer", option(momentum=0.0)),
    Entry(
        "moments are forgotten",
        "dp2",
        "optimizer-state",
        "optimizer",
        stepped(lambda u: _states(u, _forget)),
        **ADAM,
    ),
    Entry(
        "moments in bf16",
        "dp2",
        "optimizer-state",
        "optimizer",
        stepped(lambda u: _states(u, _rounded)),
        **ADAM,
    ),
    Entry("a parameter stays", "dp2", "stale", "dp", first_stays),
    Entry("a shard stays", "dp2:zero1", "dead", "dp", second_shard_stays),
    Entry(
        "gradients a step late",
        "dp2",
        "gradient-kept",
        "optimizer",
        gradients_of_the_step_before,
        keys={"clip_grad_norm": None},
    ),
    Entry("gradients in bf16", "dp2", "precision", "precision", gradients_rounded(BF16)),
    Entry(
        "gradients in float32", "dp2", "precision", "precision", gradients_rounded(torch.float32)
    ),
    Entry("sums in bf16", "dp2", "precision", "precision", summed_in(BF16)),
    Entry("weights in bf16", "dp2", "precision", "precision", weights_rounded(BF16)),
    Entry("weights in float32", "mb2", "precision", "precision", weights_rounded(torch.float32)),
    Entry("clips by value", "dp2", "clip", "clip", clipped_apart(True), **CLIP),
    Entry("clips each tensor", "dp2", "clip", "clip", clipped_apart(False), **CLIP),
    Entry(
        "clips twice",
        "dp2",
        "clip",
        "clip",
        changed(lambda u, c, t, d: c.factor * c.factor * d),
        **CLIP,
    ),
    Entry(
        "clips by a rank's share",
        "dp2",
        "clip",
        "clip",
        changed(lambda u, c, t, d: c.factor / 2),
        **CLIP,
    ),
    Entry("the norm is squared", "dp2", "norm", "clip", norm(lambda s: s * s), **CLIP),
    Entry(
        "steps of micro-batches",
        "mb2",
        "learning-rate",
        "lr",
        rate(lambda s, t: s(2 * t)),
        **COSINE,
    ),
    Entry("the norm of micro-batches", "mb2", "norm", "mb", norm(lambda s: s * 2), **CLIP),
]
