"""The count of a step's loss over all ranks, known before the first forward.

Backward divides by it at once, so that gradients are those of the mean loss, as on one device. A
hook that clamps the gradient of an activation then does what it does there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from plait.comm import Axis, World
from plait.engine.axes import within_stage
from plait.engine.batch import MicroBatch
from plait.engine.loss import LossFunction
from plait.engine.stages.timing import ImmediateUpdates, UpdateTiming
from plait.engine.update import Update
from plait.errors import ModelError
from plait.outer import Driver
from plait.plan import Plan

SERVERS = ("server", "async-server")
CountOf = Callable[[Any], "Tensor | float"]


def count_of(loss: LossFunction) -> CountOf | None:
    """The function of the targets that a loss has as its attribute `count`; None without one.

    A number that counts calls is none, nor is a method without an argument, or that of a tuple.
    """
    count: CountOf | None = getattr(loss, "count", None)
    return count if callable(count) and _takes_targets(count, loss) else None


def _takes_targets(count: CountOf, loss: LossFunction) -> bool:
    """Whether a function may be one of the targets alone."""
    if inspect.isbuiltin(count) and count.__self__ is loss:
        return False  # a named tuple or a list counts its entries
    try:
        inspect.signature(count).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, as those of torch
        return True
    return True


def counted(micro: MicroBatch, count: CountOf | None) -> Tensor | float:
    """The count (0-dim) of a micro-batch's loss, by its own function; else its samples.

    Raises:
        ModelError: the function returned no number.
    """
    if count is None:
        return micro.own_samples
    if not micro.num_samples:
        return 0.0
    with torch.no_grad():
        found = count(micro.targets)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.detach().view(())
    if isinstance(found, Real) and math.isfinite(found):
        return float(found)
    is_tensor = isinstance(found, Tensor)
    what = f"a tensor of shape {tuple(torch.as_tensor(found).shape)}" if is_tensor else repr(found)
    raise ModelError(
        f"the attribute `count` of the loss returned {what}; it must be a function of the targets "
        "that returns one number, the count of (sum, count): give it another name if it is not"
    )


class ExpectedCount:
    """The count of the steps of one engine."""

    def __init__(
        self,
        axis: Axis | None,
        device: torch.device,
        *,
        copies: int = 1,
        count: CountOf | None = None,
    ) -> None:
        """Take the ranks of a stage that step together, of which `copies` compute each loss.

        `axis` is None where this rank steps by itself. `count` tells what the loss counts, from the
        targets; without it that is the samples.
        """
        self._axis = axis if axis is not None and axis.size > 1 else None
        self._device = device
        self._copies = copies
        self._count = count

    def of(self, micro_batches: Sequence[MicroBatch]) -> float | Tensor:
        """The count of the micro-batches of all ranks; 1 where there is none. Collective.

        It is a number for samples of this rank alone. Else it is a 0-dim tensor, which the host
        does not read, and of which a recorded step takes another value.
        """
        own = sum(counted(micro, self._count) for micro in micro_batches)
        if self._axis is None and self._count is None:
            return float(own) / self._copies or 1.0
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        total += own
        total /= self._copies
        if self._axis is not None:
            self._axis.all_reduce(total, control=True).wait()
        return torch.where(total == 0.0, 1.0, total)[0]


def make_expected_count(
    loss: LossFunction,
    updater: Update,
    driver: Driver,
    timing: UpdateTiming,
    *,
    plan: Plan,
    aggregate: str,
    world: World,
) -> ExpectedCount | None:
    """The count of an engine's steps; None where the update takes sums.

    It does where gradients of several steps are under way, and where `aggregate` says that the mean
    is one of workers. Workers of a server send it sums, which it divides.
    """
    has_server = plan.dp.strategy in SERVERS
    if not isinstance(timing, ImmediateUpdates) or aggregate == "mean" or has_server:
        return None
    return ExpectedCount(
        within_stage(world) if driver.is_synchronous else None,
        world.device,
        copies=updater.loss_copies,
        count=count_of(loss),
    )
