"""The ranks of the tensor axis, and what they hold of the activations between two layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from plait.comm import Axis, World
from plait.comm.functional import transition
from plait.mesh import AxisName
from plait.mesh.layouts import REPLICATED, Layout, Sharded
from plait.mesh.tensor_layout import TensorLayout, tensor_layout
from plait.plan import TensorAxis
from plait.plan.axes import TensorMode
from plait.products import Products


@dataclass(frozen=True)
class ActivationLayout:
    """The axes that cut an activation [samples, ..., features] between two layers.

    `samples` cuts dimension 0, `sequence` dimension 1, `features` the last one; None cuts nothing.
    """

    samples: Axis | None = None
    sequence: Axis | None = None
    features: Axis | None = None

    @property
    def different(self) -> tuple[Axis, ...]:
        """The axes whose ranks hold other tokens.

        Along them the gradient of a shared parameter is a partial sum.
        """
        return tuple(axis for axis in (self.samples, self.sequence) if axis is not None)

    def global_shape(self, shape: torch.Size, feature_dim: int = -1) -> list[int]:
        """The shape that a tensor of this layout has on one device."""
        whole = list(shape)
        for axis, dim in self.cuts(feature_dim):
            whole[dim] *= axis.size
        return whole

    def local_part(self, whole: Tensor, feature_dim: int = -1) -> Tensor:
        """This rank's part of `whole` [samples, sequence, ..., features]: a view.

        Each dim that an axis cuts is 1 / its ranks as long. No communication.
        """
        for axis, dim in self.cuts(feature_dim):
            length = whole.shape[dim] // axis.size
            whole = whole.narrow(dim, axis.rank * length, length)
        return whole

    def cuts(self, feature_dim: int = -1) -> list[tuple[Axis, int]]:
        """The axes that cut such a tensor, each with the dim that it cuts."""
        pairs = ((self.samples, 0), (self.sequence, 1), (self.features, feature_dim))
        return [(axis, dim) for axis, dim in pairs if axis is not None and axis.size > 1]


@dataclass
class SavedShard:
    """The shard that backward keeps of a gathered tensor, to gather it again.

    `users` layers will ask for it; it is gathered for the first and dropped after the last.
    """

    shard: Tensor
    axis: Axis
    source: Layout
    users: int = 0
    _whole: Tensor | None = None

    def whole(self, shard: Tensor) -> Tensor:
        """The gathered tensor, from its shard as autograd has kept it.

        Collective for the first of `users`.

        Args:
            shard: of any shape, 1 / size of the dimension that `source` cuts.

        Returns:
            The shape of `shard`, whole along that dimension, on every rank.
        """
        whole = self._whole
        if whole is None:
            whole = transition(shard, self.axis, self.source, REPLICATED)
        self.users -= 1
        self._whole = whole if self.users > 0 else None
        return whole


class MatmulPlan(NamedTuple):
    """The shard from which a product's input was gathered, if it was, and who multiplies."""

    saved: SavedShard | None
    products: Products


@dataclass
class ForwardContext:
    """The state that the modules of one model share during a forward.

    Attributes:
        layout: of the activations that the last layer left.
        num_rows: samples of the current micro-batch, without padding rows. It is 0 before the first
            micro-batch, when an example finds the stages.
        products: how layers multiply.
        choices: counts of the products of a grid that streamed, and of those that gathered.

    `_source` is the last tensor that entered a layer, `_entered` the tensor that it became. The
    layers q, k and v take one tensor: one collective serves the three, forward and backward.
    """

    layout: ActivationLayout
    num_rows: int = 0
    products: Products = field(default_factory=Products)
    choices: Counter[str] = field(default_factory=Counter)
    _key: tuple[object, ...] = ()
    _source: Tensor | None = None
    _entered: Tensor | None = None
    _saved: SavedShard | None = None

    def enter(self, x: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
        """`transition`, once for a tensor that several layers take one after the other.

        Collective where the pair of layouts is; differentiable.

        Args:
            x: of any shape: whole under R, I and P; 1 / size of dimension d under S(d).
            axis: the line of ranks.
            source: the layout that `x` has.
            target: the layout that the result has; its shape follows alike.

        Raises:
            PlanError: a dimension that `x` lacks or that does not divide by the ranks.
        """
        key = (axis, source, target, x._version, torch.is_grad_enabled())
        if self._source is not x or self._key != key or self._entered is None:
            self._source = x
            self._key = key
            self._entered = transition(x, axis, source, target)
            gathers = isinstance(source, Sharded) and target == REPLICATED and axis.size > 1
            self._saved = SavedShard(x, axis, source) if gathers else None
        return self._entered

    def saved_shard(self, x: Tensor) -> SavedShard | None:
        """The shard from which `x`, of any shape, was gathered, if `x` is what entered last."""
        return self._saved if x is self._entered else None

    def forget(self) -> None:
        """Hold no activation: the forward is over."""
        self._source = None
        self._entered = None
        self._saved = None


class RememberedLayout:
    """The layout that the last layer left, as it is now."""

    def __init__(self, context: ForwardContext) -> None:
        self._context = context
        self._layout = context.layout

    def now(self) -> RememberedLayout:
        """The layout by now."""
        return RememberedLayout(self._context)

    def put_back(self) -> None:
        """Let the next layer find this layout."""
        self._context.layout = self._layout


@dataclass(frozen=True)
class TensorGroup:
    """The tensor axis of a world under one mode: `1d`, `2d`, `2.5d` or `3d`.

    `gather_limit_bytes`: the panels that a product of a grid may gather; larger ones are streamed.
    `wire`: the type in which wider activations travel; None sends them as they are.
    """

    world: World
    mode: TensorMode = "1d"
    sequence_parallel: bool = False
    name: str = ""
    gather_limit_bytes: int = 64 << 20
    products: Products = field(default_factory=Products)
    wire: torch.dtype | None = None
    _rounding: dict[AxisName, Axis] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.axis("tp").size

    def layout(self, *, has_sequence: bool = True) -> TensorLayout:
        """The cuts and moves of the mode, by the names of axes."""
        depth = dict(self.world.mesh.tp_parts).get("tp_depth", 1)
        axis = TensorAxis(self.size, self.mode, self.sequence_parallel, depth)
        return tensor_layout(axis, has_sequence=has_sequence)

    def axis(self, name: AxisName) -> Axis:
        """A part of the tensor axis; the first call is collective."""
        axis = self.world.axis(name)
        if self.wire is None:
            return axis
        return self._rounding.setdefault(name, axis.rounding(self.wire))

    def same_coordinates(self, axes: Sequence[Axis]) -> list[int]:
        """The ranks of the tensor axis, by coordinate, that stand where this one does on each of
        `axes`.
        """
        mesh = self.world.mesh
        names = [tuple(axis.name.split("*")) for axis in axes]

        def coordinates(rank: int) -> list[int]:
            return [mesh.coordinate(rank, name) for name in names]

        here = coordinates(self.world.rank)
        return [rank for rank in self.axis("tp").ranks if coordinates(rank) == here]

    def __str__(self) -> str:
        return self.name or f"tp{self.size}:{self.mode}{',sp' if self.sequence_parallel else ''}"
