"""A split model: who holds which part, which samples a rank takes, and how its loss is shared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from plait.batch_trees import (
    entries_at,
    is_per_sample,
    is_whole,
    map_leaves,
    num_rows,
    refuse_undivided,
)
from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import ModelError
from plait.forwards import runs_forward_of
from plait.mesh.layouts import INVARIANT, Sharded
from plait.origin import Line, line_of, module_of, named
from plait.parallel.tensor.group import (
    ActivationLayout,
    ForwardContext,
    RememberedLayout,
    TensorGroup,
)
from plait.parallel.tensor.layers import ParallelLinear
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.placement import Placement
from plait.parallel.tensor.roles import LINEAR
from plait.parallel.tensor.vocabulary import cross_entropy
from plait.values import PyTree

MISFIT = re.compile(r"shape '\[([-0-9, ]+)\]' is invalid for input of size (\d+)")
# Gradients of so many elements are summed where they lie; smaller ones travel together.
ALONE_NUMEL = 1 << 16

LossFunction = Callable[[PyTree, PyTree], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Share:
    """This rank's part of a micro-batch: inputs, the targets of its outputs, and its real rows.

    Tensors of `inputs` are [samples / ranks, ...], those of `targets` leave out rows that only fill
    up. `num_rows`: of the inputs of all ranks of the tensor axis together, before the filling; 0
    where ranks do not divide samples.
    """

    inputs: PyTree
    targets: PyTree
    num_samples: int
    num_rows: int


@dataclass(frozen=True)
class TensorSplit:
    """A model that `apply` has split.

    Attributes:
        context: what the modules share during a forward.
        placements: of every parameter, by name.
        originals: the modules that own parameters, before the split: they make whole values.
        outputs: the layout of the model's outputs.
        sharded_logits: whether each rank has a range of the vocabulary.
        roles: of the modules that have one, by name.
    """

    group: TensorGroup
    mode: Mode
    context: ForwardContext
    placements: Mapping[str, Placement]
    originals: Mapping[str, nn.Module]
    outputs: ActivationLayout
    sharded_logits: bool
    roles: Mapping[str, str]

    @property
    def loss_copies(self) -> int:
        """On how many ranks each sample's loss is computed."""
        return self.group.size // _size(self.outputs.samples)

    @property
    def divides_samples(self) -> bool:
        """Whether each rank of the tensor axis has samples of its own, as in a grid."""
        return _size(self.mode.residual.samples) > 1

    def share(self, inputs: object, targets: object, num_samples: int) -> Share:
        """The part of a micro-batch that this rank takes. No communication.

        Tensors [samples, ...] of `inputs` and `targets` become [samples / ranks, ...], as do
        lists of as many texts. Samples that do not divide are filled up with copies of the first,
        whose outputs `loss` leaves out.
        """
        if not self.divides_samples:
            return Share(inputs, targets, num_samples, 0)
        rows = num_rows(inputs, targets) or 0
        entering = self.mode.residual.samples
        leaving = self.outputs.samples
        assert entering is not None and leaving is not None
        length = -(-rows // entering.size)
        start = leaving.rank * length
        real = min(max(num_samples - start, 0), length)
        return Share(
            map_leaves(lambda leaf: _part(leaf, rows, entering.rank * length, length), inputs),
            map_leaves(lambda leaf: _part(leaf, rows, start, max(real, 1)), targets),
            real,
            rows,
        )

    def layout_behind(self, model: nn.Module, names: Iterable[str]) -> ActivationLayout:
        """The layout that the modules `names` leave, which a forward calls one after the other."""
        found = self.mode.residual
        for name in names:
            found = self._layout_behind_one(model.get_submodule(name), found)
        return found

    def _layout_behind_one(self, module: nn.Module, before: ActivationLayout) -> ActivationLayout:
        """The layout that a module leaves. One that has columns and rows in an order of its own
        leaves what lies between blocks.
        """
        if isinstance(module, ParallelLinear):
            return module.target
        if runs_forward_of(module, nn.Sequential):
            for child in module._modules.values():
                before = before if child is None else self._layout_behind_one(child, before)
            return before
        targets = {one.target for one in module.modules() if isinstance(one, ParallelLinear)}
        if len(targets) > 1:
            return self.mode.residual
        return next(iter(targets), before)

    def layout(self) -> RememberedLayout:
        """The layout of activations as it is now, with which a later run can begin alike."""
        return RememberedLayout(self.context)

    def enter(self, num_rows: int, layout: ActivationLayout | None = None) -> None:
        """A forward, or its recomputation, of a micro-batch of so many rows begins.

        `layout` is that of what it begins with; by default that of the model's inputs.
        """
        self.context.layout = layout or self.mode.residual
        self.context.num_rows = num_rows

    def loss(self, function: LossFunction, ignore_index: int | None) -> LossFunction:
        """`function` on this rank's outputs.

        With an `ignore_index` it is cross-entropy, which takes logits [..., vocabulary / size] in
        parts. Any other function gets whole logits [..., vocabulary], gathered. Collective then.
        """
        axis = self.outputs.features

        def loss(output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
            self.context.forget()
            self._check_output()
            rows = self._rows_here(targets)

            def without_filling(leaf: PyTree) -> PyTree:
                is_filled = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] > rows
                return leaf[:rows] if is_filled else leaf

            if rows:
                output = tree_map(without_filling, output)
            if not self.sharded_logits or axis is None or axis.size == 1:
                return function(output, targets)
            if ignore_index is not None:
                return cross_entropy(output, targets, axis, ignore_index)
            return function(transition(output, axis, Sharded(-1), INVARIANT), targets)

        return loss

    def _rows_here(self, targets: PyTree) -> int:
        """The rows of the outputs here of the micro-batch under way, without the filling.

        0 where nothing fills them up.
        """
        axis = self.outputs.samples
        if axis is None or axis.size == 1:
            return 0
        rows = self.context.num_rows
        if rows == 0:
            return num_rows(targets) or 0
        length = -(-rows // axis.size)
        return max(min(rows - axis.rank * length, length), 1)

    def _check_output(self) -> None:
        """Refuse outputs in parts of features, which only a head may leave."""
        if self.context.layout.features not in (None, self.outputs.features):
            last = [name for name, role in self.roles.items() if role in LINEAR][-1]
            raise ModelError(
                f"under {self.group} the model's output is parts of features, "
                f"which '{last}' ({self.roles[last]}) leaves: a column is followed by a row, "
                "and the last layer of a model that ends in parts has the role head"
            )

    def explain(self, model: nn.Module, error: Exception) -> ModelError | None:
        """An error for a gradient of a gradient, or for a misfit of shapes with its module and
        roles. None for any other.
        """
        if "marked with @once_differentiable" in str(error):
            return ModelError(
                "the loss or the forward takes a gradient with create_graph=True, as a gradient "
                f"penalty does, and layers that {self.group} splits have no gradient of their "
                "gradient; take tp out of the plan: dp, zero3 and mb train such a model"
            )
        if not isinstance(error, RuntimeError | IndexError | ValueError):
            return None
        name = module_of(model, error)
        if name is None:
            return None
        line = line_of(error)
        where = f"{named(name)} fails" if line is None else f"{named(name)} fails at {line}"
        fixed = None if line is None else self._fixed_number(line, error)
        if fixed is not None:
            return ModelError(f"under {self.group} {where}, {fixed}")
        if not name:
            return None
        return ModelError(f"under {self.group} {where}: {error}; {self._suspects(name)}")

    def _fixed_number(self, line: Line, error: BaseException) -> str | None:
        """The cure of a view with the model's whole number of heads written in it.

        None for any other error.
        """
        match = MISFIT.search(str(error))
        if match is None:
            return None
        view_sizes = [int(size) for size in match[1].split(",")]
        there = int(match[2])
        if (
            -1 in view_sizes
            or not 0 < there < math.prod(view_sizes)
            or math.prod(view_sizes) % there
        ):
            return None
        return (
            f"`{line.code}`: it asks for [{match[1]}], and this rank has "
            f"1/{math.prod(view_sizes) // there} of these elements, its share of the heads (or "
            "features); a number that the split divides must not be written there: put -1 in place "
            "of the number of heads, as in x.view(batch, length, -1, head_dim)"
        )

    def _suspects(self, name: str) -> str:
        """The roles inside a module, or inside the nearest that holds it and has some."""
        inside: list[str] = []
        while not inside:
            inside = [
                f"'{module}' ({role})"
                for module, role in self.roles.items()
                if not name or f"{module}.".startswith(f"{name}.")
            ]
            name = name.rpartition(".")[0]
        shown = ", ".join(inside[:12]) + (" ..." if len(inside) > 12 else "")
        return (
            f"if it runs under dp1, a role is wrong there: {shown} (a column is followed by a row)"
        )

    def weight(self, name: str) -> float:
        """The factor of a parameter's elements in a sum over the tensor axis.

        With it the sum counts every element once.
        """
        return 1.0 / self.placements[name].copies

    def details(self) -> dict[str, float]:
        """Counts of grid products since the last call: those that gathered, and that streamed."""
        counts = self.context.choices
        details = {f"products_{choice}": float(number) for choice, number in counts.items()}
        counts.clear()
        return details

    def sum_partial(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Sum, in place, the gradients of parameters whose copies saw other tokens. Collective.

        `gradients` by name, contiguous, each of the shape of this rank's part. Called once a step,
        after the data axis has reduced. With micro-batches or ZeRO that is less to sum than in each
        backward.
        """
        by_axes: dict[tuple[str, ...], tuple[tuple[Axis, ...], list[Tensor]]] = {}
        for name, gradient in gradients:
            axes = self.placements[name].partial
            if axes:
                names = tuple(axis.name for axis in axes)
                by_axes.setdefault(names, (axes, []))[1].append(gradient)
        for axes, tensors in by_axes.values():
            for axis in axes:
                _sum_together(tensors, axis)


def _sum_together(tensors: Sequence[Tensor], axis: Axis) -> None:
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        alone = axis.paths.beyond("shared_gradient_numel", tensor.numel(), ALONE_NUMEL - 1)
        (large if alone else small).append(tensor)
    works = [axis.all_reduce(tensor) for tensor in large]
    if small:
        together = torch.cat([tensor.reshape(-1) for tensor in small])
        axis.all_reduce(together).wait()
        for tensor, part in zip(
            small, together.split([tensor.numel() for tensor in small]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))
    for work in works:
        work.wait()


def _size(axis: Axis | None) -> int:
    return 1 if axis is None else axis.size


def _part(leaf: PyTree, rows: int, start: int, length: int) -> PyTree:
    """Rows [start, start + length) of a tensor, or of a list of as many entries as `rows`.

    Copies of the first row stand where it has no more.
    """
    if is_whole(leaf):
        return leaf
    refuse_undivided(leaf, rows)
    if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
        part = leaf[start : start + length]
        missing = length - part.shape[0]
        if missing == 0:
            return part
        return torch.cat([part, leaf[:1].expand(missing, *leaf.shape[1:])])
    if is_per_sample(leaf) and len(leaf) == rows:
        return entries_at(leaf, [row if row < rows else 0 for row in range(start, start + length)])
    return leaf
