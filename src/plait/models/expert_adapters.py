"""Low-rank adapters on packed experts: parameters [E, out, in] that hold a matrix of each expert.

Experts that plait computes (`ExpertWeights`) multiply by the narrow matrices. A library's own
experts read their weights in a forward that is theirs. While it runs, they find sums W + s B A in
the place of their weights, as under PEFT. `low_rank` says how the matrices lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models import packed_experts
from plait.models.adapter_parts import PARTS, Adapter, AdapterSettings, Zeros, means
from plait.models.experts import ExpertWeights
from plait.models.low_rank import apart, total
from plait.values import PyTree

BARE = "bare_weights"
"""The attribute of experts that holds their weights while sums are in their places."""
DIMS = 3
"""The dimensions of a parameter that holds matrices: experts, outputs and inputs."""


def find(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The packed experts of a model that can have adapters, by name, and their matrices' names."""
    found = {}
    for name, module in model.named_modules():
        keys = matrices_of(module)
        if name and keys:
            found[name] = keys
    return found


def matrices_of(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module that hold a matrix of each of its experts; empty for another."""
    if not isinstance(module, ExpertWeights) and not packed_experts.is_packed(module):
        return ()
    params = module._parameters.items()
    stacks = {key: param for key, param in params if param is not None and param.dim() == DIMS}
    numbers = {param.shape[0] for param in stacks.values()}
    return tuple(stacks) if len(numbers) == 1 else ()


def meant(target: str, experts: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The experts that a target names, and which of their matrices: those named, or all."""
    found = {}
    for name, keys in experts.items():
        named = keys if means(target, name) else [k for k in keys if means(target, f"{name}.{k}")]
        if named:
            found[name] = tuple(named)
    return found


def check(settings: AdapterSettings, name: str) -> None:
    """Raise `ModelError` for a kind or a dropout that experts in one tensor cannot have."""
    if settings.kind != "lora":
        raise ModelError(
            f"adapter.kind = {settings.kind!r}: the experts '{name}' take lora alone; leave them "
            "out of adapter.targets, or take lora"
        )
    if settings.dropout:
        raise ModelError(
            f"adapter.dropout = {settings.dropout:g}: the experts '{name}' have none, as in PEFT; "
            "leave them out of adapter.targets, or set dropout = 0"
        )


def attach(module: nn.Module, keys: tuple[str, ...], settings: AdapterSettings) -> None:
    """Hang an adapter on the matrices `keys` of packed experts."""
    target: PyTree = module
    transposed = getattr(module, "is_transposed", False) is True
    first, second = nn.ModuleDict(), nn.ModuleDict()
    for key in keys:
        weight = module.get_parameter(key)
        number, out, into = weight.shape
        if transposed:
            out, into = into, out
        like = {"device": weight.device, "dtype": weight.dtype}
        rows = number * settings.rank
        first[key] = nn.Linear(into, rows, bias=False, **like)
        second[key] = Zeros(rows, out, bias=False, **like)
    module.add_module(PARTS[0], first)
    module.add_module(PARTS[1], second)
    target.adapter = Adapter(
        settings.kind,
        settings.rank,
        settings.scale,
        0.0,
        transposed,
        base=settings.base,
        keys=keys,
    )
    if not isinstance(module, ExpertWeights):
        module.register_forward_pre_hook(put_sums)
        module.register_forward_hook(put_back, always_call=True)


def put_sums(module: Any, args: PyTree) -> None:
    """Before a forward: sums of weights and adapters in the places of the weights."""
    adapter: Adapter = module.adapter
    bare: dict[str, Tensor] = {}
    vars(module)[BARE] = bare  # first, so that a sum which fails leaves nothing behind
    for key in adapter.keys:
        bare[key] = module._parameters[key]
        matrices = (module.lora_A[key].weight, module.lora_B[key].weight)
        a, b = apart(*matrices, adapter.rank)
        module._parameters[key] = total(
            bare[key], a, b, adapter.scale, transposed=adapter.transposed
        )


def put_back(module: Any, args: PyTree, output: PyTree) -> None:
    """After a forward, also one that was broken off: the weights themselves."""
    module._parameters.update(vars(module).pop(BARE, {}))


def merged(weight: Tensor, a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
    """The weights of experts with their adapters added, in the shape of `weight` [E, ...].

    a [E r, in], b [out, r E].
    """
    apart_a, apart_b = apart(a, b, adapter.rank)
    return total(weight, apart_a, apart_b, adapter.scale, transposed=adapter.transposed)


def peft_places(keys: tuple[str, ...]) -> Mapping[str, str]:
    """Where PEFT has the matrices of each parameter, behind the name of the experts.

    It wraps a module once for each parameter, and the first is the innermost.
    """
    return {key: ".base_layer" * (len(keys) - 1 - i) for i, key in enumerate(keys)}
