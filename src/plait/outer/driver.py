"""The contract of a driver: when the ranks of the data axis exchange what.

The engine names the moments of a step, in this order:

    before_step      a step begins
    sum_totals       loss, count, norm and flags of use are summed over the ranks that step together
    apply            the gradients become an update
    report           the loss that the result of the step names
    synchronize      the state is about to be read from outside: all ranks come to one state

A synchronous driver sums over all ranks and updates at once. The others exchange differences of
weights (`local`) or gradients of older weights (`async-server`), each at its own pace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.comm import Axis
from plait.parallel.data import DataStrategy, OptimizerShard


@dataclass(frozen=True)
class DeviceChange:
    """The decision of a device about an update. Each is 0-dim in float64.

    Attributes:
        factor: factor on the summed gradients.
        blocked: 1.0 where the update is to change nothing, else 0.0.
    """

    factor: Tensor
    blocked: Tensor


@dataclass(frozen=True)
class Change:
    """One update that an optimizer is asked for.

    Attributes:
        step: number of the step, from 0.
        factor: factor on the summed gradients.
        rate: factor on the learning rate.
        on_device: takes the place of the factor where the host does not know it yet.
        settings: of each group of the optimizer, as they were when the step began; without them
            those of now.
    """

    step: int
    factor: float
    rate: float = 1.0
    on_device: DeviceChange | None = None
    settings: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class StepReport:
    """The loss of a step: its sum, its count, and the tokens of all ranks that became known."""

    loss_sum: float
    count: float
    tokens: int


class Driver(ABC):
    """Decides when ranks exchange what.

    Attributes:
        is_synchronous: every rank takes part in every update. Otherwise the loss, norm and count of
            a step are this rank's own.
        first_step: steps that the other ranks had made when this one joined.
    """

    is_synchronous: bool
    first_step: int

    @abstractmethod
    def before_step(self) -> None:
        """A step begins."""

    @abstractmethod
    def sum_totals(self, totals: Tensor, axis: Axis) -> None:
        """Sum `totals` (n,), which are loss, count, squared norm, flags of use and so on, in place.
        The sum is over those ranks of `axis` that step together. Collective of them.
        """

    @abstractmethod
    def apply(self, change: Change) -> None:
        """Turn the gradients into an update that every rank concerned sees."""

    @abstractmethod
    def report(self, loss_sum: float, count: float) -> StepReport:
        """The loss to report for the step that has just ended."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Figures of the step that has just ended, by name."""

    @abstractmethod
    def staleness(self) -> Counter[int]:
        """Number of gradients that this rank has applied as a server, by their staleness."""

    @abstractmethod
    def extra_state(self, piece: OptimizerShard) -> dict[str, Tensor]:
        """Tensors that the driver keeps of a shard from step to step, to be saved with it. Each has
        the shape of the shard's `value`.
        """

    @abstractmethod
    def live_tensors(self) -> list[Tensor]:
        """Tensors of any shape that the driver keeps between steps, counted as optimizer state."""

    @abstractmethod
    def restart(self) -> None:
        """Begin again from the parameters as they are: they were written from outside."""

    @abstractmethod
    def synchronize(self) -> None:
        """Bring all ranks to one state, before it is saved or the run ends. Collective."""

    @abstractmethod
    def leave(self) -> None:
        """Take no step for a while; no other rank waits for this one."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and sockets."""


class SynchronousDriver(Driver):
    """Sums over all ranks, updates, and publishes, in every step."""

    is_synchronous = True
    first_step = 0

    def __init__(self, strategy: DataStrategy, make_update: Callable[[Change], None]) -> None:
        self._strategy = strategy
        self._make_update = make_update

    def before_step(self) -> None:
        pass

    def sum_totals(self, totals: Tensor, axis: Axis) -> None:
        axis.all_reduce(totals, control=True).wait()

    def apply(self, change: Change) -> None:
        self._make_update(change)
        self._strategy.publish()

    def report(self, loss_sum: float, count: float) -> StepReport:
        return StepReport(loss_sum, count, int(count))

    def metrics(self) -> dict[str, float]:
        return {}

    def staleness(self) -> Counter[int]:
        return Counter()

    def extra_state(self, piece: OptimizerShard) -> dict[str, Tensor]:
        return {}

    def live_tensors(self) -> list[Tensor]:
        return []

    def restart(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
