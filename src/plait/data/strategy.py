"""The contract of the data axis: what a strategy is told, and when.

The engine names the moments of a step; a strategy answers them and nothing else:

    begin            a step begins
    begin_forward    a micro-batch's forward begins     (ZeRO-3 gathers its first unit)
    end_forward      ... has ended                      (and frees its last)
    arm              the next backward is the last one: gradients may be reduced as they become
    ready
    end_backward     a backward has ended
    reduce           have every gradient summed over the axis
    total            sum the step's scalars (loss, counts, norm) over the ranks that step together
    update           have the optimizer update this rank's pieces
    end_step         the optimizer has updated its pieces: by default, publish
    settle           the state is to be read from outside: bring all ranks to one
    publish          let every rank see the values of the pieces, whoever wrote them

Gradients are *summed*, never divided: the loss is normalised in one place, and that place is not
here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.crew import Crew
from plait.data.asynchrony import Asynchrony, Change
from plait.data.bucket import Bucket, Part
from plait.data.gradients import BucketState, Collector, Sink
from plait.data.units import Unit

CPU = torch.device("cpu")
Weight = Callable[[str], float]


@dataclass(frozen=True)
class DataGroup:
    """The ranks of the data axis as this rank sees them, and the precisions that they use.

    `shard` are the ranks that share one copy of the sharded state; `replicate` those that hold
    equal shards. Without `replicateM` the first is the whole axis and the second has size 1.
    """

    axis: Axis
    shard: Axis
    replicate: Axis
    param_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    offload: bool = False
    num_servers: int | None = None
    asynchrony: Asynchrony = field(default_factory=Asynchrony)
    crew: Crew | None = None  # where ranks come and go


@dataclass(frozen=True)
class Told:
    """What a step's result says: a loss sum and its count, and the tokens of all ranks that have
    become known with it.
    """

    loss_sum: float
    count: float
    tokens: int


@dataclass(frozen=True)
class Piece:
    """What the optimizer of this rank owns of one parameter: the elements [part.start, part.stop).

    `value` is what the optimizer updates (master precision; in the parameter's shape when the piece
    is the whole parameter, else 1-D). Its `.grad` is set by `DataStrategy.reduce`.
    """

    name: str
    part: Part
    value: nn.Parameter
    state: BucketState

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.part.numel


@dataclass(frozen=True)
class FrozenPiece:
    """What this rank holds of a parameter that no optimizer updates: elements [part.start,
    part.stop), 1-D.
    """

    name: str
    part: Part
    value: Tensor


@dataclass(frozen=True)
class Replicas:
    """How many ranks of the axis hold the same pieces, and which of them this rank is."""

    count: int
    index: int


class DataStrategy(ABC):
    """How the ranks of the data axis share gradients, optimizer state and parameters.

    `lockstep`: every rank takes part in every update. Where it is False a step's loss, norm and
    count are this rank's own.
    """

    lockstep: ClassVar[bool] = True
    steps_before: int = 0  # that the others had made when this rank came

    def __init__(self, group: DataGroup) -> None:
        self.group = group
        self.states: list[BucketState] = []
        self.frozen_states: list[BucketState] = []
        self.pieces: list[Piece] = []
        self.secondary: frozenset[str] = (
            frozenset()
        )  # parameters that another pipeline stage holds too, and counts
        self.collector: Collector

    @abstractmethod
    def write(self, state: BucketState, index: int, value: Tensor) -> None:
        """Give slot `index` its value (the full parameter); what this rank does not hold is
        dropped.
        """

    @abstractmethod
    def reduce(self) -> None:
        """Have every gradient of this step summed over the axis, and bind `piece.value.grad`."""

    @abstractmethod
    def publish(self) -> None:
        """Let every rank see what the optimizers made of their pieces."""

    @property
    @abstractmethod
    def replicas(self) -> Replicas:
        """The ranks of the axis that hold the same pieces as this one."""

    def replicas_of(self, piece: Piece) -> Replicas:
        """`replicas`, of one piece: strategies that are made of several answer for the one that has
        it.
        """
        return self.replicas

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """This rank's share of the squared norm of the summed gradients; the shares add up over the
        axis. 0-dim.

        `weight` of a parameter's name is what its elements count, where other ranks hold them too.
        """
        counted = (piece for piece in self.pieces if piece.name not in self.secondary)
        grads = (
            (piece.name, piece.value.grad) for piece in counted if piece.value.grad is not None
        )
        return weighted_squared_norm(grads, self.group.device, weight) / self.replicas.count

    def sinks(self) -> Mapping[int, Sink]:
        """Where layers may add their weights' gradients themselves, by the id of the parameter;
        empty where nowhere.
        """
        return self.collector.sinks()

    def frozen_pieces(self) -> list[FrozenPiece]:
        """What this rank holds of frozen parameters that the strategy has sharded."""
        return []

    def begin(self) -> None:
        """A step begins."""
        self.collector.begin()

    def total(self, scalars: Tensor, axis: Axis) -> None:
        """Sum (loss, count, squared norm, flags of use ...) in place over those ranks of `axis`
        that step together.
        """
        axis.all_reduce(scalars, control=True).wait()

    def start(self, apply: Callable[[Change], None]) -> None:
        """Everything is built: `apply` has the optimizer of this rank's pieces make one update.
        Collective.
        """
        self._apply = apply

    def update(self, change: Change) -> None:
        """The gradients are to become an update."""
        self._apply(change)

    def end_step(self) -> None:
        """The optimizer has updated its pieces."""
        self.publish()

    def tell(self, loss_sum: float, count: float) -> Told:
        """What the result of the step that has just ended says of the loss."""
        return Told(loss_sum, count, int(count))

    def details(self) -> dict[str, float]:
        """What the step that has just ended adds to the metrics, by name."""
        return {}

    def staleness(self) -> Counter[int]:
        """How many gradients this rank has applied as a server, by their staleness; empty where all
        ranks step together.
        """
        return Counter()

    def kept(self, piece: Piece) -> dict[str, Tensor]:
        """What the strategy itself keeps of a piece from step to step, to be saved with it."""
        return {}

    def settle(self) -> None:  # noqa: B027
        """Bring all ranks to one state, before it is saved or the run ends. Collective."""

    def rest(self) -> None:  # noqa: B027
        """This rank takes no step for a while, or for ever; nobody need wait for it."""

    def close(self) -> None:  # noqa: B027
        """Give back what the strategy runs besides (threads, sockets)."""

    def begin_forward(self) -> None:  # a moment that most strategies have no use for  # noqa: B027
        """A micro-batch's forward begins."""

    def end_forward(self) -> None:  # noqa: B027
        """A micro-batch's forward has ended."""

    def arm(self, weight: float | None = None) -> None:
        """The next backward is the last one of this step. `weight`, if given, is this rank's in the
        sum.
        """
        self.collector.arm(weight)

    def end_backward(self) -> None:
        """A backward has ended."""
        self.collector.end_backward()

    def end_input_grad(self) -> None:  # noqa: B027
        """A backward that leaves weight gradients for later has ended."""

    def is_secondary(self, piece: Piece) -> bool:
        """Whether another pipeline stage holds the same parameter, and saves and counts it."""
        return piece.name in self.secondary

    def slots(self) -> Iterator[tuple[BucketState, int]]:
        """Every trainable parameter, by bucket and index."""
        return ((state, index) for state in self.states for index in range(len(state.bucket.slots)))

    def forget_untouched(self, touched: Sequence[bool]) -> None:
        """Take the gradient away from parameters that no rank used in this step: the optimizer
        shall skip them.

        `touched` is in the order of `slots`.
        """
        unused = {
            id(state.bucket.slots[index])
            for (state, index), used in zip(self.slots(), touched, strict=True)
            if not used
        }
        if unused:
            for piece in self.pieces:
                if id(piece.part.slot) in unused:
                    piece.value.grad = None

    @abstractmethod
    def live_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps, under `parameters`, `gradients` and `buffers`."""


def weighted_squared_norm(
    grads: Iterable[tuple[str, Tensor]], device: torch.device, weight: Weight | None
) -> Tensor:
    """The sum of squares of all elements, each times the weight of its name. 0-dim, float64."""
    if weight is None:
        return squared_norm((grad for _, grad in grads), device)
    by_weight: dict[float, list[Tensor]] = {}
    for name, grad in grads:
        by_weight.setdefault(weight(name), []).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for factor, tensors in by_weight.items():
        total += factor * squared_norm(tensors, device)
    return total


def squared_norm(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all elements. 0-dim, float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        flat = grad.reshape(-1)
        total += torch.dot(flat, flat).to(total)
    return total


def make_states(
    units: Sequence[Unit], num_shards: int, *, frozen: bool = False
) -> list[BucketState]:
    """One bucket a unit, in the order in which backward completes them: the last unit first."""
    states: list[BucketState] = []
    for unit in reversed(units):
        params = unit.frozen if frozen else unit.trainable
        if params:
            states.append(BucketState(Bucket.of(unit.name, params, num_shards), len(states)))
    return states


def make_piece(state: BucketState, part: Part, flat: Tensor) -> Piece:
    """The optimizer's piece of `flat`, the master values of the range that `part` is placed in."""
    return Piece(part.slot.name, part, nn.Parameter(part.view(flat)), state)


def bind(slot_param: nn.Parameter, view: Tensor) -> None:
    """Let a module's parameter be `view`."""
    slot_param.data = view
