"""The losses whose gradients one update adds up, and what a loop has done to each.

A forward computes its gradient before the loop scales its loss. So the scales of one update must be
those by which the forwards have added their gradients, times one factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from plait.errors import ModelError

ALIKE: Final = 1e-4
"""The part by which two scales may differ, as of numbers that were rounded to float32."""


@dataclass(eq=False)
class AddedLoss:
    """The loss of one call. `scale`: what its backwards have multiplied it by, in all."""

    backwards: int = 0
    scale: float = 0.0


class AddedLosses:
    """The losses of the calls since the last update."""

    def __init__(self) -> None:
        self._losses: list[AddedLoss] = []
        self._told = 0.0

    def add(self) -> AddedLoss:
        """The loss of the next call."""
        self._losses.append(AddedLoss())
        return self._losses[-1]

    def drop(self) -> None:
        """Forget all calls, as after an update."""
        self._losses = []
        self._told = 0.0

    def scaled(self, loss: AddedLoss, scale: float, norm: float, *, begins: bool) -> float:
        """A backward of `scale` times a loss has come; what it adds to the gradient's length.

        `norm` is that of the mean of the gradients, once it is known. `begins`: the gradient is
        zero, as it is before the first backward of an update.

        Raises:
            ModelError: the gradients of the loss are gone, or those of the last update are not.
        """
        if not (begins or self._told):
            raise ModelError(
                "loss.backward() found the gradients of the last update, which one device would "
                "add up; an update under a plan uses them up, so call optimizer.zero_grad() "
                "behind optimizer.step()"
            )
        if loss not in self._losses:
            raise ModelError(
                "the backward of a loss came after its gradients were dropped, which another "
                "forward in training, optimizer.step() or optimizer.zero_grad() does; call "
                "loss.backward() before them. Where one update has several forwards, say that "
                "gradients accumulate for all but the last (accelerator.accumulate(model), "
                "fabric.no_backward_sync(model))"
            )
        loss.backwards += 1
        loss.scale += scale
        length = sum(one.scale for one in self._losses) * norm
        added, self._told = length - self._told, length
        return added

    def may_forget(self) -> bool:
        """Whether all gradients so far are to be forgotten; not where their backwards are to come.

        Raises:
            ModelError: some of the backwards have come.
        """
        had = sum(one.backwards > 0 for one in self._losses)
        if had and had < len(self._losses):
            raise ModelError(
                "gradients were zeroed between a forward and its backward, with those of an "
                "earlier batch among them, which the forward has added already; zero them before "
                "the first forward of an update, or behind optimizer.step()"
            )
        return had == len(self._losses)

    def check(self, weights: Sequence[float]) -> None:
        """Look whether the loop's scales are those by which gradients were added.

        Raises:
            ModelError: a loss had no backward, or other scales.
        """
        pairs = list(zip(self._losses, weights, strict=True))
        if any(not one.backwards for one, _ in pairs):
            raise ModelError(
                "a forward in training had no backward, and its gradients are among those of the "
                "update, as a forward computes both; call loss.backward() for each batch that "
                "accumulates, or call the model under torch.no_grad() where none is wanted"
            )
        ratios = [one.scale / weight for one, weight in pairs if weight]
        largest = max(map(abs, ratios), default=0.0)
        if all(math.isclose(one, ratios[0], abs_tol=ALIKE * largest) for one in ratios):
            return
        scales = ", ".join(f"{one.scale:.4g}" for one, _ in pairs)
        added = ", ".join(f"{weight:.4g}" for _, weight in pairs)
        raise ModelError(
            f"the loop has multiplied the losses of one update by {scales}, and their gradients "
            f"were added with the weights {added}, as a forward computes them before that; "
            "multiply all of them by the same number, and give other weights to the loss function. "
            "Where they are counts of labels, call model.weigh(by_counts=True) before the first"
        )
