"""Precision of the computation and of what is kept; the scale of the loss that float16 needs.

bf16 has the range of float32, so master weights and sums in float32 are all it needs. float16 has
not: small gradients would vanish, so backward starts from a multiple of the loss (P. Micikevicius
et al., Mixed Precision Training, 2018, section 3.2). The scale is found by trying. A step whose
gradient overflows is dropped and the scale halved; many good steps double it. The decision follows
the global norm, one number that all ranks have. So they agree without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plait.errors import CheckpointError, NonFiniteLoss, PlanError
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.values import JsonMapping

DTYPES = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "float64": torch.float64,
}
MASTER_DTYPES = {
    "float32": torch.float32,
    "bf16": torch.float32,
    "fp8": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """`compute`: parameters and activations. `master`: what the optimizer updates, and the sums of
    gradients.
    """

    compute: torch.dtype
    master: torch.dtype
    scaled: bool = False

    @staticmethod
    def of(plan: Plan, *, float16: bool = False) -> Precision:
        """The precision of a plan. `float16` computes in float16 where the plan says float32.
        Raises PlanError where that cannot be.
        """
        if not float16:
            return Precision(DTYPES[plan.precision], MASTER_DTYPES[plan.precision])
        reason = _no_scale(plan)
        if reason:
            raise PlanError(f"'{plan}': float16 {reason}")
        return Precision(torch.float16, torch.float32, scaled=True)

    def loss_scale(self, *, of_sums: bool = False) -> LossScale | NoLossScale:
        """A new scale of the loss for one engine, whose backward begins with sums or with means."""
        return LossScale(of_sums=of_sums) if self.scaled else NoLossScale()


def _no_scale(plan: Plan) -> str | None:
    if plan.precision != "float32":
        return (
            f"keeps its masters in float32, and the plan says precision:{plan.precision}; leave "
            "that out"
        )
    if plan.dp.size > 1 and not STRATEGIES[plan.dp.strategy].synchronous:
        return (
            f"needs ranks that agree on every step's scale, and those of {plan.dp} do not step "
            "together; use bf16"
        )
    if plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].asynchronous:
        return (
            f"needs steps that can be dropped as a whole, and {plan.pp.schedule} updates each "
            "stage by itself; use bf16"
        )
    return None


class NoLossScale:
    """The loss as it is: every step counts."""

    value = 1.0
    reported: float | None = None
    skipped = False

    def judge(self, squared_norm: float, step: int) -> bool:
        """Whether the step counts: always. A norm that is not finite is an error elsewhere."""
        return True

    def adapt(self) -> None:
        """The step has ended."""

    def meta(self) -> dict[str, list[float]]:
        """Nothing for a checkpoint to keep."""
        return {}

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take nothing from a checkpoint."""


class LossScale:
    """The dynamic scale of float16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

    `value` multiplies the mean loss of a step in backward, or the sum with `of_sums`. A gradient
    without a finite norm halves it and drops the step. After `growth_interval` good steps it
    doubles. A checkpoint has the two kinds under other names, since one is no start for the other.
    """

    LEAST = 2.0**-20

    def __init__(
        self, value: float | None = None, growth_interval: int = 200, *, of_sums: bool = False
    ) -> None:
        first = 2.0**8 if of_sums else 2.0**15
        self.value = first if value is None else value
        self._key = "loss_scale" if of_sums else "mean_loss_scale"
        self._interval = growth_interval
        self._good = 0
        self.skipped = False  # whether the last step was dropped

    @property
    def reported(self) -> float | None:
        """The scale, for the result of a step."""
        return self.value

    def meta(self) -> dict[str, list[float]]:
        """The entry of a checkpoint's meta data."""
        return {self._key: self.state()}

    def load_meta(self, meta: JsonMapping) -> None:
        """Go on as `meta` says. A checkpoint of another precision, or of another kind of scale,
        says nothing.
        """
        if self._key in meta:
            self.load(meta[self._key])

    def judge(self, squared_norm: float, step: int) -> bool:
        """Whether the step counts. Raises NonFiniteLoss where no scale helps."""
        self.skipped = not math.isfinite(squared_norm)
        if self.skipped and self.value <= self.LEAST:
            what = f"the gradient is {squared_norm} in float16 whatever the loss is scaled by"
            raise NonFiniteLoss(f"step {step}: {what}; use bf16")
        return not self.skipped

    def adapt(self) -> None:
        """The step has ended."""
        if self.skipped:
            self.value = self.value / 2
            self._good = 0
            return
        self._good += 1
        if self._good >= self._interval:
            self.value = self.value * 2
            self._good = 0

    def state(self) -> list[float]:
        """The scale, and the number of good steps since it changed."""
        return [self.value, float(self._good)]

    def load(self, state: list[float]) -> None:
        """Go on from the numbers that `state` returned. Errors: `CheckpointError` for numbers that
        are no scale.
        """
        sound = isinstance(state, list) and len(state) == 2
        if not sound or not all(isinstance(x, float) and math.isfinite(x) for x in state):
            raise CheckpointError(f"meta.{self._key} is {state!r}, and must be two finite numbers")
        if state[0] <= 0 or state[1] < 0:
            raise CheckpointError(f"meta.{self._key} is {state!r}: no scale is 0 or less")
        self.value = state[0]
        self._good = int(state[1])
