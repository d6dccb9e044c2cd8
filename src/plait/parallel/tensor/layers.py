"""The parallel forms of modules.

Each computes what its original does, on this rank's parts, under the same parameter names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import ModelError
from plait.mesh.layouts import INVARIANT, Sharded
from plait.parallel.tensor.group import ActivationLayout, ForwardContext
from plait.parallel.tensor.mode import EmbeddingRule, LinearRule
from plait.parallel.tensor.norms import normalise
from plait.parallel.tensor.vocabulary import look_up
from plait.torch_internals import foreign_hooks, is_of_plait
from plait.values import PyTree

HOOKS = {
    "_forward_pre_hooks": "forward pre-",
    "_forward_hooks": "forward ",
    "_backward_pre_hooks": "backward pre-",
    "_backward_hooks": "backward ",
}
"""torch's tables of a module's hooks, and what each is called."""


class ParallelLinear(nn.Module):
    """x W^T + b: [..., in] -> [..., out], from its rule's source layout into the target layout.

    `picked`: the output features of this rank, of a packed layer whose weight each rank has whole.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        rule: LinearRule,
        context: ForwardContext,
        in_features: int,
        *,
        transposed: bool,
        label: str,
        picked: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._label = label
        self._rule = rule
        self._context = context
        self._in_features = in_features
        self._transposed = transposed
        self.picked = picked

    @property
    def target(self) -> ActivationLayout:
        """The layout of its output."""
        return self._rule.target

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of x W^T + b; differentiable, and collective where the mode moves parts.

        Whole features (of raw data, or of a replicated layer) are cut first.

        Args:
            x: [..., in / i], this rank's part, where i ranks cut the input features; or [..., in].

        Returns:
            [..., out / o], where o ranks cut the output features. The tokens are those of the
            target layout: under `1d,sp` a column gathers the sequence and a row scatters it.

        Raises:
            ModelError: `x` has other features.
        """
        rule = self._rule
        num_parts = 1 if rule.source.features is None else rule.source.features.size
        local = self._in_features // num_parts
        if x.shape[-1] not in (local, self._in_features):
            raise misfit(self._label, x.shape[-1], f"{local}, its part of {self._in_features}")
        x = part_of_features(x, rule.source.features, self._in_features)
        weight = self.weight.t() if self._transposed else self.weight
        bias = self.bias
        if self.picked is not None:
            picked = self.picked.to(weight.device)
            weight = weight[picked]
            bias = None if bias is None else bias[picked]
        self._context.layout = rule.target  # before the product, where a recomputation may end
        return rule.product(x, weight, bias, self._context)


def picked_rows(parts: Sequence[tuple[int, bool]], axis: Axis | None) -> Tensor:
    """The numbers [out of this rank] of a rank's output features, on the host.

    `parts`: the output features of each part, and whether `axis` cuts it or every rank has all.
    """
    assert axis is not None  # the axis that cuts the features
    rows: list[int] = []
    start = 0
    for length, is_cut in parts:
        share = length // axis.size if is_cut else length
        first = start + (axis.rank * share if is_cut else 0)
        rows += range(first, first + share)
        start += length
    return torch.tensor(rows, device="cpu")


def misfit(label: str, found: int, expected: str) -> ModelError:
    """The error of a layer whose input has other features than its role says.

    The table of roles is wrong for this layer, or for the one before.
    """
    return ModelError(
        f"{label} gets {found} features and expects {expected}: its role, or that of the layer "
        "before it, is wrong (a column is followed by a row; what lies between them has no role "
        "or computes each element alone)"
    )


def check_mask(label: str, mask: object, length: int) -> None:
    """Refuse a mask that a model has made for the part of the sequence that this rank holds.

    Raises:
        ModelError: the mask is of another length than the sequence.
    """
    if isinstance(mask, Tensor) and mask.shape[-1] != length:
        raise ModelError(
            f"'{label}' gets a mask of {mask.shape[-1]} positions for a sequence of {length}: "
            "the model makes masks (of a sliding window) from the part of the sequence that a rank "
            "holds; take tpN without sp, or a longer window"
        )


def whole_features(label: str) -> Callable[..., PyTree]:
    """A hook of a replicated linear layer, which refuses parts of features."""

    def hook(module: nn.Linear, args: tuple[PyTree, ...]) -> None:
        if args and args[0].shape[-1] != module.in_features:
            raise misfit(label, args[0].shape[-1], f"all {module.in_features}")

    return hook


def part_of_features(x: Tensor, axis: Axis | None, num_features: int) -> Tensor:
    """This rank's part [..., num_features / size] of `x` [..., num_features], or a part as it is.

    No communication in forward, a gathering in backward; differentiable.
    """
    if axis is None or axis.size == 1 or x.shape[-1] != num_features:
        return x
    return transition(x, axis, INVARIANT, Sharded(-1))


class ParallelEmbedding(nn.Module):
    """Token numbers [B, S] -> vectors of the residual stream."""

    weight: Tensor

    def __init__(
        self,
        rule: EmbeddingRule,
        context: ForwardContext,
        stream: ActivationLayout,
        padding_index: int | None,
        *,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self._rule = rule
        self._context = context
        self._stream = stream
        self._padding_index = padding_index
        self._scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors of `tokens` [batch, sequence], this rank's samples. Collective.

        Returns [batch, sequence / s, features / f]: s ranks of sequence parallel, f that cut
        features. A padding token's row gets no gradient, as in the original. Raises `DataError` for
        a token outside the vocabulary.
        """
        self._context.layout = self._stream
        vectors = look_up(tokens, self.weight, self._rule, self._padding_index)
        if self._scale is None:
            return vectors
        return vectors * torch.tensor(self._scale, dtype=vectors.dtype, device=vectors.device)


class ParallelNorm(nn.Module):
    """Layer norm (`centered`) or RMS norm over features that are cut.

    The weight is `offset` + the parameter.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, axis: Axis, eps: float | None, *, centered: bool, offset: float) -> None:
        super().__init__()
        self._axis = axis
        self._eps = eps
        self._centered = centered
        self._offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., features / size] -> [..., features / size]. Collective and differentiable once."""
        eps = torch.finfo(x.dtype).eps if self._eps is None else self._eps
        y = normalise(x, self._axis, eps, centered=self._centered)
        if self.weight is not None:
            y = y * (self.weight + self._offset if self._offset else self.weight)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(nn.Linear):
    """A linear layer that every rank computes alike, on whole features."""

    def __init__(self, axis: Axis, context: ForwardContext, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = original.in_features
        self.out_features = original.out_features
        self._axis = axis
        self._context = context

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] or, in parts, [..., in / size] -> [..., out], alike on every rank.

        Features in parts are gathered first, which is collective. Differentiable.
        """
        if x.shape[-1] != self.in_features:
            x = transition(x, self._axis, Sharded(-1), INVARIANT)
        self._context.layout = ActivationLayout(
            self._context.layout.samples, self._context.layout.sequence, None
        )
        return F.linear(x, self.weight, self.bias)


def tell_rows(module: nn.Module, source: Axis | None, target: Axis | None) -> None:
    """Have a module compute the samples of `target`, in a model fed with those of `source`.

    Documents and positions of packed samples [batch / source, sequence] become those [batch /
    target, sequence]. The hook is collective over `source`.
    """
    if source is None or target is None or source is target:
        return

    def move(rows: Tensor) -> Tensor:
        whole = rows.new_empty((source.size * rows.shape[0], *rows.shape[1:]))
        source.all_gather(whole.view(-1), rows.contiguous().view(-1)).wait()
        length = whole.shape[0] // target.size
        return whole.narrow(0, target.rank * length, length)

    def hook(
        module: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        def moved(value: PyTree) -> PyTree:
            is_rows = isinstance(value, Tensor) and value.dim() == 2
            return move(value) if is_rows else value

        return tuple(map(moved, args)), {key: moved(value) for key, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def with_positions(axis: Axis) -> Callable[..., PyTree]:
    """A hook that gives a position module this rank's positions [sequence / size].

    Given ones [..., sequence] are cut. The module's input is [batch, sequence / size, ...].
    """

    def hook(
        module: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        length = args[0].shape[1]
        start = axis.rank * length
        positions = kwargs.get("positions")
        if positions is None:
            local = torch.arange(start, start + length, device=args[0].device)
        else:
            local = positions[..., start : start + length]
        return args, {**kwargs, "positions": local}

    return hook


def own_positions(axis: Axis) -> Callable[..., PyTree]:
    """A hook that keeps this rank's part [..., sequence / size, features] of all positions."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        length = output.shape[-2] // axis.size
        return output.narrow(-2, axis.rank * length, length)

    return hook


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module itself holds, by name."""
    return {key: param for key, param in module._parameters.items() if param is not None}


def give_child(module: nn.Module, key: str, child: nn.Module) -> None:
    """Put a child in a table of children that a shallow copy has for itself."""
    module._modules = {**module._modules, key: child}


def shallow_copy(module: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """A module with tables of parameters and hooks of its own, and the same entries in them.

    `kind`: its class, by default that of the module.

    Without `copy`, which torch refuses for a module with parametrizations. A forward that the
    module has of its own, as one that cuts sequences, reads the parameters of the copy.
    """
    twin: nn.Module = object.__new__(kind or type(module))
    vars(twin).update(vars(module))
    if "forward" in vars(module):
        twin.forward = _of_twin(module.forward, module, twin)
    for table in (
        "_parameters",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    ):
        setattr(twin, table, type(getattr(module, table))(getattr(module, table)))
    return twin


def check_hooks(name: str, old: nn.Module, new: nn.Module, group: object) -> None:
    """Raise `ModelError` where a layer that computes a part leaves out hooks of the whole one.

    Hooks of plait itself are not among them: adapters give each part its own.
    """
    for table, what in HOOKS.items():
        hooks: dict[int, object] = getattr(old, table)
        users = {key for key, hook in hooks.items() if not is_of_plait(hook)}
        if not users <= getattr(new, table).keys():
            raise ModelError(
                f"'{name or 'the model'}' ({type(old).__name__}) has a {what}hook, and {group} "
                "computes the layer in parts, which the hook would not see as one; remove the "
                "hook, or take tp out of the plan"
            )


def check_parameter_hooks(name: str, param: nn.Parameter, group: object) -> None:
    """Raise `ModelError` for a parameter [...] with a hook of its own, as a rank holds a part.

    Those of an earlier engine are not among them.
    """
    if foreign_hooks(param):
        raise ModelError(
            f"the parameter '{name.removeprefix('.')}' has a hook, and {group} computes parts of "
            "its gradient, which the hook would not see as one; remove the hook, or take tp out "
            "of the plan"
        )


def _of_twin(forward: Any, module: nn.Module, twin: nn.Module) -> Any:
    """The forward of a copy `twin`: bound to the copy, and inside the same wrappers."""
    if getattr(forward, "__self__", None) is module:
        return types.MethodType(forward.__func__, twin)
    wrap = getattr(forward, "wrapped_by", None)
    return forward if wrap is None else wrap(_of_twin(forward.__wrapped__, module, twin))


def weight_of(name: str, module: nn.Module) -> nn.Parameter:
    """The weight of a layer that is cut; `ModelError` where it is computed from others."""
    weight = module._parameters.get("weight")
    if weight is None:
        raise ModelError(
            f"'{name}' ({type(module).__name__}) computes its weight from other parameters, as "
            "weight_norm and spectral_norm do, and tp cuts weights that are parameters; take tp "
            "out of the plan"
        )
    return weight
