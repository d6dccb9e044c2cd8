"""Steps that a device decides on, so that the host need not wait: it reads them a step later.

Whether a step counts, and the factor on its gradients, follow from sums that the device has. Once a
step does not count, no later one changes anything, until the host has read its sums. It then makes
those steps again, and decides on each by itself (`plait.engine.training_step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.comm import World
from plait.engine.guard import Guard, put_back
from plait.engine.loss import LossSum
from plait.engine.options import Options
from plait.engine.precision import LossScale, NoLossScale
from plait.engine.stages.pipeline import PipelineStep
from plait.engine.stages.timing import ImmediateUpdates, UpdateTiming
from plait.engine.step import Outcome
from plait.engine.sums import COUNT, LOSS_DIVISOR, SQUARED_NORM, HostPages, StepSums
from plait.engine.suspect import StepSizes
from plait.engine.update import CLIP_EPSILON, Update
from plait.outer import DeviceChange, Driver
from plait.parallel.pipeline.actions import Action


@dataclass(frozen=True)
class StepReadout:
    """The sums of a step, and what this rank has sent behind them, on the host."""

    values: Sequence[float]
    blocked: bool
    squared_norm: float
    losses: Sequence[float]
    loads: Sequence[float]

    def sizes(self, stage: int) -> StepSizes:
        """The losses and the norm; a rank of several stages counts as its last one."""
        return StepSizes(self.losses, {stage: self.squared_norm**0.5})


@dataclass(frozen=True)
class PendingStep:
    """A step that was made, and whose sums the host has not read.

    Attributes:
        index: of the step, from 0.
        step: its micro-batches.
        actions: what it did.
        sums: of all ranks, on their way to the host.
        num_loads: numbers of the load of experts behind them.
        buffers: of the model, with their values before the step.
        outcome: where its numbers are told.
    """

    index: int
    step: PipelineStep
    actions: Sequence[Action]
    sums: StepSums
    num_loads: int
    buffers: Sequence[tuple[Tensor, Tensor]]
    outcome: Outcome

    def read(self) -> StepReadout:
        """Wait for the sums of this step."""
        values = self.sums.read()
        size = self.sums.values.numel()
        end = len(values) - self.num_loads
        squared_norm, blocked, *own = values[size:end]
        totals, counts = own[: len(own) // 2], own[len(own) // 2 :]
        losses = [total / (count or 1.0) for total, count in zip(totals, counts, strict=True)]
        return StepReadout(values[:size], bool(blocked), squared_norm, losses, values[end:])

    def undo(self) -> None:
        """Give the buffers their values before the step."""
        put_back(self.buffers)


class PendingSteps:
    """The steps whose sums the host has not read, oldest first: two at most."""

    def __init__(
        self,
        take: Callable[[PendingStep, StepReadout], None],
        again: Callable[[PendingStep, StepReadout | None], None],
    ) -> None:
        """`take` learns of a step that counts, `again` makes one again while the host decides.

        `again` also gets the readout of the first step that did not count.
        """
        self._take = take
        self._again = again
        self._steps: deque[PendingStep] = deque()

    def add(self, made: PendingStep) -> None:
        """A step was made."""
        self._steps.append(made)

    @property
    def newest(self) -> PendingStep | None:
        """The last step; None where the host has read all."""
        return self._steps[-1] if self._steps else None

    def resolve(self, left: int) -> None:
        """Read all steps but the `left` newest. Those from the first that did not count are made
        again. Collective there, as the sums of these steps are equal on all ranks.
        """
        while len(self._steps) > left:
            readout = self._steps[0].read()
            if readout.blocked:
                self._repeat(readout)
            else:
                self._take(self._steps.popleft(), readout)

    def _repeat(self, refused: StepReadout) -> None:
        steps = list(self._steps)
        self._steps.clear()
        for made in steps:  # what is known of them, should the first end the training
            made.outcome.tell(replace(made.outcome.numbers, skipped=True))
        for made in reversed(steps):
            made.undo()
        for made in steps:
            self._again(made, refused if made is steps[0] else None)


class Deferral:
    """The decisions of one engine's device, and their way to the host."""

    def __init__(self, device: torch.device, clip_grad_norm: float | None) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._one = torch.ones_like(zero)
        self._clip = None if clip_grad_norm is None else torch.full_like(zero, clip_grad_norm)
        self._blocked = zero
        self._pages = HostPages(device)

    def decide(self, sums: StepSums) -> DeviceChange:
        """Whether a step changes anything, and the factor on its summed gradients."""
        self._blocked = torch.where(sums.sound(), self._blocked, self._one)
        factor = sums.values[LOSS_DIVISOR] / sums.values[COUNT]
        if self._clip is not None:
            norm = sums.values[SQUARED_NORM].sqrt() * factor
            factor = factor * (self._clip / (norm + CLIP_EPSILON)).clamp(max=1.0)
        return DeviceChange(factor, self._blocked)

    def send(self, sums: StepSums, decided: DeviceChange, loss: LossSum, *loads: Tensor) -> None:
        """Begin to send the sums to the host, and behind them what else `StepReadout` has.

        `loads` are those of experts, flat.
        """
        each = loss.each()
        totals = [total.double() for total, _ in each]
        counts = [count for _, count in each]
        own = torch.stack([sums.own_norm, decided.blocked, *totals, *counts])
        sums.send(self._pages, own, *loads)

    def reopen(self) -> None:
        """The host has read of the step that did not count."""
        self._blocked = torch.zeros_like(self._blocked)


def make_deferral(
    options: Options,
    updater: Update,
    driver: Driver,
    timing: UpdateTiming,
    *,
    guard: Guard,
    scale: LossScale | NoLossScale,
    world: World,
) -> Deferral | None:
    """The decisions of a device; None where the host decides on each step before its update.

    It does on processors, where a read costs nothing. It must where the optimizer's kernel takes no
    flag, and where ranks do not step together. It must also where float16's scale, the size of a
    gradient, or a mean of workers matters. Collective, as all ranks decide alike.
    """
    device = updater.device
    wanted = device.type != "cpu" if options.defer_reads is None else options.defer_reads
    alike = (
        wanted
        and driver.is_synchronous
        and isinstance(timing, ImmediateUpdates)
        and isinstance(scale, NoLossScale)
        and not guard.decides_by_size
        and options.aggregate == "sum"
    )
    if not alike:
        return None
    told: list[bool] = world.axis("world").gather_objects(updater.decides_on_device)
    return Deferral(device, options.clip_grad_norm) if all(told) else None
