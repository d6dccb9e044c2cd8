"""The parameter that stands for all parameters of a model under a plan, and its gradient.

Its gradient is a vector of two numbers, as long as the global norm. A loop may change its length,
which the update follows. A change of its direction shows what no factor can follow.
"""

from __future__ import annotations

import math
from typing import Final, NoReturn

import torch
from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.parallel.data.absent import Absent, become

SECOND: Final = 2.0**-10
"""The second number of a gradient's direction, of which the first is nearly 1."""

STRAIGHT: Final = 1e-3
"""The part by which the second number may be off, as float32 rounds it."""


class _ForAll(Absent):
    """A parameter that stands for all parameters of a model under a plan."""

    where = "on the ranks, in parts"


def stand_in(device: torch.device) -> nn.Parameter:
    """A parameter [2] whose numbers are refused."""
    made = nn.Parameter(torch.zeros(2, device=device))
    become(made, _ForAll.kind(nn.Parameter, _no_numbers))
    return made


def direction(like: Tensor) -> Tensor:
    """The direction [2] of all gradients, of length 1."""
    return like.new_tensor([math.sqrt(1.0 - SECOND**2), SECOND])


def factor_of(left: Tensor, whole: Tensor) -> float:
    """The factor by which a loop has left [2] of a whole gradient [2]; 1 where there is none.

    Raises:
        ModelError: it is no number, or the loop has done something else to it.
    """
    (first, second), (length, _) = left.tolist(), whole.tolist()
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ModelError(
            f"the gradient was changed to {first:.4g}, which is no number, and nothing was updated"
        )
    if abs(second - first * SECOND) > STRAIGHT * abs(first * SECOND):
        raise ModelError(
            "the gradients were changed otherwise than by one factor, as by "
            "clip_grad_value_, by noise or by a sign; ranks have the gradients in parts, so that a "
            "loop may clip them by their norm, scale them and zero them. Anything else belongs "
            "into the optimizer"
        )
    return first / length if length else 1.0


def check_norm(norm_type: float) -> None:
    """Raise `PlanError` for a clip by another norm than that of all gradients' squares."""
    if float(norm_type) != 2.0:
        raise PlanError(
            f"a clip by norm_type={norm_type} needs the numbers of all gradients, and a loop under "
            "a plan knows their norm_type=2 alone; leave norm_type out"
        )


def refuse_clip_by_value() -> NoReturn:
    """Raise `PlanError` for a clip of each number of the gradients."""
    raise PlanError(
        "a clip by value needs each gradient's numbers, which ranks have in parts; clip by norm, "
        "or in a hook of the optimizer's step: model.engine.update.optimizer has this rank's parts"
    )


def _no_numbers(gradient: Tensor) -> NoReturn:
    raise ModelError(
        "a parameter of the prepared model was read or written, and stands for all parameters, "
        "which ranks have in parts; a penalty on weights belongs into the model's forward, or is "
        "weight_decay of the optimizer, and other writes come before the model is prepared. "
        "model.engine.local_parameters() has this rank's numbers"
    )
