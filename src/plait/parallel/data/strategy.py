"""The contract of the data axis: the moments of a step, and who holds which parameters.

    begin_step             a step begins
    before_forward         a micro-batch's forward begins     (ZeRO-3 gathers its first unit)
    after_forward          ... has ended                      (and frees its last)
    before_last_backward   gradients may be reduced as soon as they are complete
    after_backward         a backward has ended
    reduce                 every gradient is summed over the axis
    publish                all-gather: every rank sees the values of the shards

Between `reduce` and `publish` the driver of the exchange (`outer.driver`) calls the optimizer.
Gradients are *summed*, never divided: the loss is normalised in one place (`engine.loss`), and that
place is not here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.membership import Membership
from plait.mesh import Shard
from plait.parallel.data.bucket import Bucket, SlotRange
from plait.parallel.data.gather_order import GatherOrder
from plait.parallel.data.gradients import BucketState, MainGrad, Reducer
from plait.parallel.data.units import Unit

CPU = torch.device("cpu")
Weight = Callable[[str], float]
HALVES = (torch.bfloat16, torch.float16)
"""Precisions whose squares are summed in float32."""


class RunningForward:
    """Whether a forward of any stage of this rank is under way, or the loss of one.

    A stage may read parameters of another, and a loss those of the whole model.
    """

    def __init__(self) -> None:
        self.is_under_way = False

    def begin(self) -> None:
        """A forward begins."""
        self.is_under_way = True

    def end(self) -> None:
        """A forward has ended."""
        self.is_under_way = False

    @contextmanager
    def during(self) -> Iterator[None]:
        """A loss is computed inside."""
        self.begin()
        try:
            yield
        finally:
            self.end()


@dataclass(frozen=True)
class DataGroup:
    """The ranks of the data axis as this rank sees them, and the precisions that they use.

    Attributes:
        axis: all ranks of the data axis.
        shard: ranks that share one copy of the sharded state; the whole axis without `replicateM`.
        replicate: ranks that hold equal shards; of size 1 without `replicateM`.
        param_dtype: precision of the parameters that layers compute with.
        master_dtype: precision of the values that the optimizer updates.
        device: device of the parameters.
        offload: whether optimizer state lies in the host's memory.
        num_servers: ranks that serve under `server`; None means all.
        eager: buckets are reduced during a backward. False where a schedule mixes parts of several
            backwards: then they are reduced at its end.
        tied_copies: parameters that an earlier pipeline stage holds too, and counts.
        membership: the ranks that join and leave; None where all stay.
        fixed_order: sums over micro-batches and ranks follow one tree.
        one_backward: one rank makes a step's gradients by one backward, and the update takes them
            as they were computed.
        keeps_gradients: buffers of gradients keep their memory from step to step.
        running_forward: shared by the strategies of all stages of a rank.
    """

    axis: Axis
    shard: Axis
    replicate: Axis
    param_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    offload: bool = False
    num_servers: int | None = None
    eager: bool = True
    tied_copies: frozenset[str] = frozenset()
    membership: Membership | None = None
    fixed_order: bool = False
    one_backward: bool = False
    keeps_gradients: bool = False
    running_forward: RunningForward = field(default_factory=RunningForward, compare=False)

    @property
    def worker(self) -> int:
        """This rank's number among the workers, present or not."""
        return self.axis.rank if self.membership is None else self.membership.worker

    @property
    def num_workers(self) -> int:
        """The number of workers, present or not."""
        return self.axis.size if self.membership is None else self.membership.num_workers


@dataclass(frozen=True)
class Replicas:
    """Ranks of the axis that hold the same elements: how many, and which of them this rank is."""

    count: int
    index: int


@dataclass(frozen=True)
class OptimizerShard:
    """The elements [part.start, part.stop) of one parameter that this rank's optimizer owns.

    `value` is what the optimizer updates (master precision). It has the parameter's shape when the
    piece is the whole parameter, else (numel,). Its `.grad` is set by `DataStrategy.reduce`.
    `replicas` are the ranks that own the same elements. A tied copy is owned by an earlier pipeline
    stage too, which saves and counts it.
    """

    name: str
    part: SlotRange
    value: nn.Parameter
    state: BucketState
    replicas: Replicas
    is_tied_copy: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.part.numel


class RoundedCopies:
    """The optimizer's pieces in the precision of the layers, which one update may write itself.

    The pieces' gradients have that precision, too, unless several were added up.
    """

    def __init__(self, pieces: Sequence[OptimizerShard], flats: Sequence[Tensor]) -> None:
        """`flats` are the layers' parameters (padded_numel,), one a bucket."""
        self._copies = {
            id(piece.value): piece.part.view(flats[piece.state.index]) for piece in pieces
        }
        self._is_written = False

    def of(self, value: nn.Parameter) -> Tensor:
        """The copy of a piece [...], of its shape."""
        return self._copies[id(value)]

    def are_written(self) -> None:
        """The update has written all copies."""
        self._is_written = True

    def take_written(self) -> bool:
        """Whether the update since the last call has written all copies."""
        is_written, self._is_written = self._is_written, False
        return is_written


class DataStrategy(ABC):
    """A way of sharing parameters, gradients and optimizer state over the ranks of the data axis.

    Attributes:
        group: the ranks and their precisions.
        states: the buckets of trainable parameters.
        frozen_states: the buckets of frozen parameters that the strategy shards.
        pieces: the shards that this rank's optimizer owns.
        gather_orders: the orders of this step's gathers, which must be every rank's.
        copies: where an update may write the parameters that layers see. None where gradients are
            not kept as computed.
        reducer: reduces each bucket when its gradients are complete.
    """

    reducer: Reducer

    def __init__(self, group: DataGroup) -> None:
        self.group = group
        self.states: list[BucketState] = []
        self.frozen_states: list[BucketState] = []
        self.pieces: list[OptimizerShard] = []
        self.gather_orders: list[GatherOrder] = []
        self.copies: RoundedCopies | None = None

    def begin_step(self) -> None:
        """A step begins."""
        self.reducer.begin_step()

    def before_forward(self) -> None:  # noqa: B027 - whole parameters need nothing
        """A micro-batch's forward begins."""

    def after_forward(self) -> None:  # noqa: B027 - whole parameters need nothing
        """A micro-batch's forward has ended."""

    def before_last_backward(self, weight: float | None = None) -> None:
        """The next backward is the last one of this step.

        `weight`, if given, is the factor of this rank's gradients in the sum.
        """
        self.reducer.before_last_backward(weight)

    def after_backward(self, *, weight_grads: bool = True) -> None:
        """A backward has ended; without `weight_grads` it has left these for later."""
        if weight_grads:
            self.reducer.after_backward()

    @abstractmethod
    def reduce(self) -> None:
        """Sum every gradient of this step over the axis, and bind `piece.value.grad`, in the shape
        of `piece.value`. Collective.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let every rank see the updated values of all shards. Collective under `server`, `zero1`
        and `zero2`; `zero3` gathers in the next forward.
        """

    @abstractmethod
    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        """Give slot `index` its value, the full parameter in its shape; elements of other ranks are
        dropped.
        """

    @property
    @abstractmethod
    def replicas(self) -> Replicas:
        """The ranks of the axis that own the same pieces as this one."""

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """This rank's share of the squared norm of the summed gradients. 0-dim, float64.

        The shares add up over the axis. `weight` of a parameter's name is the factor of its
        elements, where other ranks hold them too.
        """
        grads = (
            (piece.name, piece.value.grad)
            for piece in self.pieces
            if piece.value.grad is not None and not piece.is_tied_copy
        )
        return self._sum_of_squares(grads, weight) / self.replicas.count

    def _sum_of_squares(self, grads: Iterable[tuple[str, Tensor]], weight: Weight | None) -> Tensor:
        """The sum of squares of gradients by name; in float64 where sums have a fixed order."""
        if self.group.fixed_order:
            grads = ((name, grad.double()) for name, grad in grads)
        return weighted_squared_norm(grads, self.group.device, weight)

    def main_grads(self) -> Mapping[int, MainGrad]:
        """The places where layers may add their weights' gradients, by the id of the parameter."""
        return self.reducer.main_grads()

    def frozen_shards(self, *, trained: bool = False) -> list[Shard]:
        """This rank's shards of frozen parameters that the strategy has sharded; empty where they
        are whole. With `trained` also those that trained parameters are gathered from.
        """
        return []

    def decoded_shards(self) -> list[Shard]:
        """This rank's shards of frozen parameters that are kept in codes, as numbers in memory of
        their own.
        """
        return []

    @abstractmethod
    def live_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps, by `parameters`, `gradients`, `optimizer` and
        `buffers`.

        Each is flat: a bucket's buffer (padded_numel,), or this rank's shard of it (shard_numel,).
        A buffer that buckets share is of the size of the largest.
        """


def weighted_squared_norm(
    grads: Iterable[tuple[str, Tensor]], device: torch.device, weight: Weight | None
) -> Tensor:
    """The sum of squares of all elements, each times the weight of its name. 0-dim, float64.

    `grads` are (name, tensor [...]) of this rank alone; nothing is sent.
    """
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
    """The sum of squares of all elements of tensors [...]. 0-dim, float64; nothing is sent."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    halves = []
    for grad in grads:
        if grad.dtype in HALVES:
            halves.append(grad)
            continue
        flat = grad.reshape(-1)
        total += torch.dot(flat, flat).to(total)
    if halves:
        norms = torch._foreach_norm(halves, 2, torch.float32)
        total += torch.stack(norms).double().square().sum()
    return total


def make_states(
    units: Sequence[Unit], num_shards: int, *, frozen: bool = False
) -> list[BucketState]:
    """One bucket a unit, in the order in which backward completes them: the last unit first. Units
    without such parameters have none.
    """
    states: list[BucketState] = []
    for unit in reversed(units):
        params = unit.frozen if frozen else unit.trainable
        if params:
            states.append(BucketState(Bucket.of(unit.name, params, num_shards), len(states)))
    return states


def make_optimizer_shard(
    state: BucketState, part: SlotRange, flat: Tensor, group: DataGroup, replicas: Replicas
) -> OptimizerShard:
    """The optimizer's piece of `flat`, the master values of the range that `part` is placed in.

    `flat` is a bucket's buffer (padded_numel,) or a shard of it (shard_numel,). The piece is a
    view.
    """
    name = part.slot.name
    value = nn.Parameter(part.view(flat))
    vars(value).update(vars(part.slot.param))  # such as `_optim`, by which users make groups
    return OptimizerShard(name, part, value, state, replicas, name in group.tied_copies)


def bind(slot_param: nn.Parameter, view: Tensor) -> None:
    """Let a module's parameter be `view`, of the parameter's shape."""
    slot_param.data = view
