"""Give each rank of the expert axis its part of the experts, in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from plait.comm import Axis
from plait.errors import ModelError
from plait.mesh.boxes import Box
from plait.models import packed_experts
from plait.models.experts import MixtureOfExperts
from plait.parallel.expert import adapters
from plait.parallel.expert.dispatch import ExpertExchange
from plait.parallel.expert.route import AllToAllGroups

PACK = (
    "make one module of them: parameters [experts, ...], up_proj (or gate_up_proj) and down_proj, "
    "and forward(tokens, chosen, weights), which returns the weighted sum of the chosen experts"
)


@dataclass(frozen=True)
class ExpertPart:
    """A rank's part of a parameter of shape `shape`: the `box` of its elements, seen as `view`."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    box: Box
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertSplit:
    """By name: this rank's part of each parameter, and the original modules of experts."""

    parts: dict[str, ExpertPart]
    originals: dict[str, nn.Module]


def apply(model: nn.Module, groups: AllToAllGroups) -> ExpertSplit:
    """Cut the parameters of all experts [E, ...] into equal parts along E, one a rank of the axis.
    Works on meta models.

    Raises `ModelError` for a model without experts, or a number of them that does not divide.
    """
    axis = groups.whole
    layers: dict[str, MixtureOfExperts] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    packed = packed_experts.find(model)
    if not layers and not packed:
        raise ModelError(f"ep{axis.size} splits experts, and this model has none{_cure(model)}")
    split = ExpertSplit({}, {})
    for name, layer in layers.items():
        _check_divides(name, layer.router.settings.num_experts, axis)
        _cut(f"{name}.experts", layer.experts, axis, split)
        number = layer.router.settings.num_experts
        _cut_matrices(f"{name}.experts", layer.experts, number, axis, split)
        layer.exchange_by(ExpertExchange(groups))
    for name, experts in packed.items():
        _check_divides(name, experts.num_experts, axis)
        for owner, keys in experts.keys_by_owner().items():
            part = f"{name}.{owner}" if owner else name
            _cut(part, experts.module.get_submodule(owner), axis, split, keys)
        _cut_matrices(name, experts.module, experts.num_experts, axis, split)
        for outer, wrapper in adapters.around(model, name).items():
            _cut_matrices(outer, wrapper, experts.num_experts, axis, split)
            wrapper.num_experts = experts.num_experts // axis.size
        number = experts.num_experts // axis.size
        experts.keep(number, ExpertExchange(groups), axis.rank * number)
    return split


def _check_divides(name: str, number: int, axis: Axis) -> None:
    if number % axis.size:
        raise ModelError(
            f"'{name}' has {number} experts, which ep{axis.size} does not divide; "
            f"choose a divisor of {number}"
        )


def _cure(model: nn.Module) -> str:
    """Names the first module of experts that is of no known kind, and what would be one."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if packed_experts.is_packed(module):
            return (
                f" that it knows ('{name}' is a {kind}); leave ep out, or let its forward be the "
                "weighted sum of experts that see each token by itself"
            )
        if isinstance(module, nn.ModuleList) and _is_list_of_experts(name, module):
            return (
                f" that it knows ('{name}' is a list of {len(module)} modules, which the model's "
                f"own code calls); leave ep out, or {PACK}"
            )
        if "Experts" in kind:
            return f" that it knows ('{name}' is a {kind}); leave ep out, or {PACK}"
    return "; leave ep out or give it num_local_experts"


def _is_list_of_experts(name: str, modules: nn.ModuleList) -> bool:
    kinds = {type(module).__name__ for module in modules}
    return "expert" in name.rpartition(".")[2].lower() or any("Expert" in kind for kind in kinds)


def _cut(
    name: str, experts: nn.Module, axis: Axis, split: ExpertSplit, keys: Sequence[str] = ()
) -> None:
    """Cut the parameters `keys` of a module; all where none is given."""
    original = _kept(name, experts, split)
    for key in keys or original._parameters:
        param = original._parameters[key]
        assert param is not None
        length = param.shape[0] // axis.size
        offset = (axis.rank * length, *(0 for _ in param.shape[1:]))
        local = (length, *param.shape[1:])
        shape = tuple(param.shape)
        split.parts[f"{name}.{key}"] = ExpertPart(shape, shape, Box(offset, local), local)
        _place(experts, key, param, local)


def _cut_matrices(
    name: str, owner: nn.Module, num_experts: int, axis: Axis, split: ExpertSplit
) -> None:
    """Cut the matrices of an adapter on or around packed experts with them, where there are any."""
    for matrix, linear, place in adapters.matrices(name, owner):
        original = _kept(matrix, linear, split)
        param = original._parameters["weight"]
        assert param is not None
        shape = tuple(param.shape)
        cut = adapters.cut_of(shape, place, num_experts, axis.rank, axis.size)
        split.parts[f"{matrix}.weight"] = ExpertPart(shape, *cut)
        _place(linear, "weight", param, cut[-1])


def _kept(name: str, module: nn.Module, split: ExpertSplit) -> nn.Module:
    """A copy of a module that has its whole parameters, remembered under its name."""
    original = copy.copy(module)
    original._parameters = dict(module._parameters)
    reset = vars(module).get("reset_parameters")
    if isinstance(reset, partial) and reset.args == (module,):
        original.reset_parameters = partial(reset.func, original)  # type: ignore[assignment]
    split.originals[name] = original
    return original


def _place(module: nn.Module, key: str, param: nn.Parameter, shape: tuple[int, ...]) -> None:
    """Put a parameter of a rank's shape, without memory, in the place of the whole one."""
    element = torch.zeros((), dtype=param.dtype, device=param.device)
    part = nn.Parameter(element.expand(shape), requires_grad=param.requires_grad)
    vars(part).update(vars(param))
    module.register_parameter(key, part)
