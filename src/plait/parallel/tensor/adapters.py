"""Low-rank adapters on layers that are split: A is cut as the layer's inputs are, B as its outputs.

Between A and B the activations are narrow, so what travels is narrow too:

    1d column   x whole:  u = x A^T           y_i = u B_i^T     dA is a partial sum
    1d row      u = sum of x_i A_i^T          y = u B^T         as the layer's own sum
    grids       u = sum over the features of x A^T, moved to the samples of y

On one device x is [..., in], A [rank, in], u [..., rank], B [out, rank] (Hu et al., "LoRA", 2021,
section 4.1). With magnitudes [out] it is DoRA (Liu et al., "DoRA", 2024, section 4).

The base layer has its own way to multiply, and neither A nor B is cut as its weight is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import ModelError
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from plait.parallel.tensor.dropout import mask_like
from plait.parallel.tensor.group import ActivationLayout, ForwardContext, TensorGroup
from plait.parallel.tensor.layers import give_child, part_of_features
from plait.parallel.tensor.mode import LinearRule, Mode
from plait.parallel.tensor.placement import Cut
from plait.values import PyTree

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""The children of a layer that are its adapter."""
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AdapterRule:
    """How the adapter of one layer is split.

    Attributes:
        into: the axes that cut the inputs of A.
        out: the axes that cut the outputs of B, and magnitudes.
        enter: the input of A from what the layer gets: [..., in / i], where `into` has i ranks.
        waist: the input [..., rank] of B from the output of A, a partial sum over `into`.
        source: the layout of the layer's input as it comes.
        layout: of A's input, once it has entered.
        partial_a: the axes over which A's gradients are partial sums.
        partial_b: those of B.
    """

    into: Cut
    out: Cut
    enter: Move
    waist: Move
    source: ActivationLayout
    layout: ActivationLayout
    partial_a: Cut
    partial_b: Cut


def adapter_rule(
    rule: LinearRule, mode: Mode, group: TensorGroup, context: ForwardContext, is_inside: bool
) -> AdapterRule:
    """The rule of an adapter on a layer with `rule`; `is_inside` a region that has gathered."""
    if mode.residual.features is not None:
        return _on_grid(rule)
    every = group.axis("tp")
    features = mode.inner.features
    assert features is not None
    between = _between(mode.residual, features)
    if rule.source.features is not None:
        source = rule.source
        sums = (source.different, rule.target.different)

        def waist(u: Tensor) -> Tensor:
            return transition(u, features, PARTIAL, between)

        return AdapterRule((features,), (), _as_it_is, waist, source, source, *sums)

    def enter(x: Tensor) -> Tensor:
        return x if is_inside else context.enter(x, features, between, REPLICATED)

    entered = replace(mode.inner, features=None)
    source = entered if is_inside else rule.source
    sums = ((every,), entered.different)
    return AdapterRule((), (features,), enter, _as_it_is, source, entered, *sums)


def _between(residual: ActivationLayout, axis: Axis) -> Layout:
    """The layout of the residual stream along the axis that cuts features inside."""
    if residual.sequence is axis:
        return Sharded(1)
    return Sharded(0) if residual.samples is axis else INVARIANT


def _on_grid(rule: LinearRule) -> AdapterRule:
    """Samples that the layer moves to other ranks are moved between A and B."""
    source = rule.source
    target = rule.target
    assert source.features is not None
    assert target.features is not None
    entering: Axis = source.features
    leaving: Axis = target.features

    def waist(u: Tensor) -> Tensor:
        if source == target:
            return transition(u, entering, PARTIAL, REPLICATED)
        gathered = transition(u, leaving, Sharded(0), REPLICATED)
        return transition(gathered, entering, PARTIAL, Sharded(0))

    different = (source.different, target.different)
    return AdapterRule((entering,), (leaving,), _as_it_is, waist, source, source, *different)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Holder(nn.Module):
    """The local part of one matrix of an adapter."""

    weight: Tensor


@dataclass(frozen=True)
class Delta:
    """A hook of a split layer: its output [..., out / o] with the adapter's share, cut alike.

    Collective where the waist moves parts, or magnitudes need norms; differentiable.
    `num_fused`: of how many parts the outputs are; `features`: of the layer's whole input.
    """

    rule: LinearRule
    adapter_rule: AdapterRule
    context: ForwardContext
    num_fused: int
    features: int

    def __call__(self, module: Any, args: tuple[PyTree, ...], output: Tensor) -> Tensor:
        adapter = module.adapter
        rule = self.adapter_rule
        x = part_of_features(args[0], self.rule.source.features, self.features)
        drops = module.training and adapter.dropout > 0
        if drops and adapter.kind == "dora":  # whose base layer sees what is left
            x = self._dropped(x, adapter.dropout, rule.source)
        entered = rule.enter(x)
        if drops and adapter.kind == "lora":  # later, so that the layer's own entering serves both
            entered = self._dropped(entered, adapter.dropout, rule.layout)
        narrow = rule.waist(F.linear(entered, module.lora_A.weight))
        delta = F.linear(narrow, module.lora_B.weight) * adapter.scale
        if adapter.kind == "lora":
            return output + delta
        base = module.forward(x) if drops else output
        if module.bias is not None:
            base = base - module.bias
        factor = module.lora_magnitude_vector.weight / self._norms(module)
        return output + (factor - 1) * base + factor * delta

    def _dropped(self, x: Tensor, p: float, layout: ActivationLayout) -> Tensor:
        return x * mask_like(x, p, self.context, layout=layout)

    @torch.no_grad()
    def _norms(self, module: Any) -> Tensor:
        """The norms of the rows of W + s B A, of the outputs of this rank."""
        adapter = module.adapter
        rule = self.adapter_rule
        weight = module.weight.t() if adapter.transposed else module.weight
        a = _part(_whole(module.lora_A.weight, 1, rule.into, 1), 1, self.rule.into, 1)
        b = _whole(module.lora_B.weight, 0, rule.out, self.num_fused)
        b = _part(b, 0, self.rule.out, self.num_fused)
        squares = (weight + adapter.scale * (b @ a)).square().sum(1)
        for axis in self.rule.into:
            squares = transition(squares, _not_rounding(axis), PARTIAL, INVARIANT)
        squares = _whole(squares, 0, self.rule.out, self.num_fused)
        return _part(squares, 0, rule.out, self.num_fused).sqrt()


def _whole(tensor: Tensor, dim: int, cut: Cut, number: int) -> Tensor:
    """The whole of a tensor whose `dim`, of `number` fused parts, is cut by axes. Collective."""
    apart = tensor.unflatten(dim, (number, -1))
    for axis in reversed(cut):
        apart = transition(apart, _not_rounding(axis), Sharded(dim + 1), INVARIANT)
    return apart.flatten(dim, dim + 1)


def _not_rounding(axis: Axis) -> Axis:
    """The axis for what is made of weights, which messages never round."""
    return axis if axis.wire is None else axis.rounding(None)


def _part(tensor: Tensor, dim: int, cut: Cut, number: int) -> Tensor:
    """This rank's part of a whole tensor: the inverse of `_whole`."""
    apart = tensor.unflatten(dim, (number, -1))
    for axis in cut:
        length = apart.shape[dim + 1] // axis.size
        apart = apart.narrow(dim + 1, axis.rank * length, length)
    return apart.flatten(dim, dim + 1)


MakeLocal = Callable[[nn.Module, list[Cut], Cut, int], nn.Module]


def split(module: Any, linear: Any, delta: Delta, local: MakeLocal) -> None:
    """Give a split layer the parts of the adapter of the whole one, where that has an adapter.

    `local` makes a part of: the matrix, its cuts, the axes of partial sums, the number of parts.
    """
    if not has_adapter(module):
        return
    rule = delta.adapter_rule
    linear.adapter = module.adapter
    for key, part in parts_of(module):
        if key == "lora_A":
            made = local(part, [(), rule.into], rule.partial_a, 1)
        else:
            cuts: list[Cut] = [rule.out, ()] if key == "lora_B" else [rule.out]
            made = local(part, cuts, rule.partial_b, delta.num_fused)
        setattr(linear, key, made)
    linear.register_forward_hook(delta)


def check_none(name: str, module: nn.Module, group: TensorGroup) -> None:
    """Refuse an adapter on a layer that is whole on ranks whose features are cut.

    Raises:
        ModelError: the layer has one.
    """
    if has_adapter(module):
        raise ModelError(
            f"'{name}' is replicated and has an adapter; under {group} features are cut between "
            "layers: leave it out of adapter.targets, or use tpN:1d"
        )


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The matrices of a layer's adapter, by the name that the layer has for them; none without."""
    if not has_adapter(module):
        return []
    found: list[tuple[str, nn.Module]] = []
    for key, part in module.named_children():
        if key in PARTS and isinstance(part, nn.ModuleDict):  # of packed experts
            found += [(f"{key}.{name}", matrix) for name, matrix in part.items()]
        elif key in PARTS:
            found.append((key, part))
    return found


def give_part(module: nn.Module, key: str, part: nn.Module) -> None:
    """Put a matrix in a shallow copy of a module under the name that `parts_of` has for it."""
    table, _, name = key.rpartition(".")
    if not table:
        give_child(module, key, part)
        return
    known = module.get_submodule(table)._modules
    held = nn.ModuleDict({**known, name: part})  # type: ignore[dict-item]
    give_child(module, table, held)


def expert_cuts(module: Any, key: str, dim: int, axis: Axis) -> list[Cut]:
    """How a matrix of packed experts is cut where their weight [E, ...] is cut along `dim`.

    `key` is its name, as `lora_A.down_proj`: A [E r, in], B [out, r E]. It is whole on every rank
    where the weight's other dimension is cut.
    """
    is_output = dim == (2 if module.adapter.transposed else 1)
    if key.startswith(PARTS[0]):
        return [(), () if is_output else (axis,)]
    return [(axis,) if is_output else (), ()]


def has_adapter(module: nn.Module) -> bool:
    """Whether an adapter hangs on a layer. Other code may call something of its own `adapter`."""
    return hasattr(module, "adapter") and PARTS[0] in module._modules
