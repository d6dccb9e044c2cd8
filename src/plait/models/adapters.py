"""Low-rank adapters: small trainable matrices beside the frozen linear layers of any model.

    LoRA   y = W x + b + s B A x                    Hu et al., "LoRA" (2021), section 4.1
    DoRA   y = b + m / |W + s B A| (W + s B A) x    Liu et al., "DoRA" (2024), section 4

An adapter hangs on its layer. Its matrices are children of the layer, and a hook adds their share
to the output. So the names of the base, its roles, its start values and its files stay as they
were. Names and shapes of the matrices are those of PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError, nearest
from plait.forwards import is_replaced, runs_forward_of
from plait.models import expert_adapters
from plait.models.adapter_parts import (
    PARTS,
    Adapter,
    AdapterSettings,
    Magnitude,
    Zeros,
    has_adapter,
    means,
    parts_of,
)
from plait.models.coded import library
from plait.values import PyTree

OUTPUTS = ("head", "lm_head", "embed_out", "output", "score", "classifier")
"""Last names of output layers, which get an adapter only where they are named."""
Reseed = Callable[[str], None]


def adapt(model: nn.Module, settings: AdapterSettings, reseed: Reseed | None = None) -> nn.Module:
    """Freeze a model and hang an adapter on each target; returns it.

    A model on the meta device stays there. Else the adapters get their values here: `reseed` is
    called with the name of a module before it is initialised. Raises `ModelError` for settings that
    cannot be, and for targets that match nothing.
    """
    settings.check()
    if adapted(model):
        raise ModelError("the model has adapters already; leave [adapter] out, or pass the base")
    targets = find_targets(model, settings.targets)
    for name, keys in targets.items():
        if keys:
            expert_adapters.check(settings, name)
    if settings.base != "none":
        library()
    model.requires_grad_(False)
    modules = {name: model.get_submodule(name) for name in targets}
    for name, module in modules.items():
        if targets[name]:
            expert_adapters.attach(module, targets[name], settings)
        else:
            attach(module, settings)
    is_meta = any(param.is_meta for param in model.parameters())
    if not is_meta:
        _initialise(modules, reseed)
    return model


def attach(module: nn.Module, settings: AdapterSettings) -> None:
    """Hang an adapter on a linear layer."""
    target: PyTree = module
    weight = target.weight
    transposed = is_transposed(module)
    out, into = weight.shape[::-1] if transposed else weight.shape
    like = {"device": weight.device, "dtype": weight.dtype}
    target.lora_A = nn.Linear(into, settings.rank, bias=False, **like)
    target.lora_B = Zeros(settings.rank, out, bias=False, **like)
    if settings.kind == "dora":
        target.lora_magnitude_vector = Magnitude(out, **like)
    target.adapter = Adapter(
        settings.kind,
        settings.rank,
        settings.scale,
        settings.dropout,
        transposed,
        base=settings.base,
    )
    module.register_forward_hook(add_delta, with_kwargs=True)


def _initialise(targets: Mapping[str, nn.Module], reseed: Reseed | None) -> None:
    """Give adapters that have memory their start: each part from the seed of its name."""
    with torch.random.fork_rng(devices=[], enabled=reseed is not None):
        for name, module in targets.items():
            for key, part in parts_of(module):
                if reseed is not None:
                    reseed(f"{name}.{key}")
                reset: Any = part.reset_parameters
                reset()
            set_magnitude(module)


@torch.no_grad()
def set_magnitude(module: Any) -> None:
    """Let the magnitude of a DoRA layer be the norms of its weight's rows."""
    if module.adapter.kind == "dora":
        norms = row_norms(module.weight, module.adapter.transposed)
        module.lora_magnitude_vector.weight.copy_(norms)


def row_norms(weight: Tensor, transposed: bool) -> Tensor:
    """The norm of each output's weights, [out], for a weight [out, in], or [in, out] where
    `transposed`; in float32 at least.
    """
    wide = weight.float() if weight.itemsize < 4 else weight
    return torch.linalg.vector_norm(wide, dim=0 if transposed else 1)


def add_delta(
    module: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], output: Tensor
) -> Tensor:
    """A hook of a layer with an adapter: its output [..., out] with the adapter's share.

    The first argument of the layer is x [..., in]. LoRA: Hu et al. 2021, section 4.1; DoRA: Liu et
    al. 2024, section 4.
    """
    adapter: Adapter = module.adapter
    x = args[0] if args else next(iter(kwargs.values()))
    dropped = F.dropout(x, adapter.dropout, module.training)
    delta = module.lora_B(module.lora_A(dropped)) * adapter.scale
    if adapter.kind == "lora":
        return output + delta
    base = output if dropped is x else module.forward(dropped)
    if module.bias is not None:
        base = base - module.bias
    factor = module.lora_magnitude_vector.weight / _whole_norms(module)
    return output + (factor - 1) * base + factor * delta


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model's linear layers are plain ones for a while: no child and no hook of an adapter."""
    kept = [
        (module, dict(module._modules), dict(module._forward_hooks))
        for module in model.modules()
        if add_delta in module._forward_hooks.values()
    ]
    for module, _, hooks in kept:
        for key in PARTS:
            module._modules.pop(key, None)
        for number, hook in hooks.items():
            if hook is add_delta:
                del module._forward_hooks[number]
    try:
        yield
    finally:
        for module, children, hooks in kept:  # back in their order
            module._modules.clear()
            module._modules.update(children)
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


@torch.no_grad()
def _whole_norms(module: Any) -> Tensor:
    """The norms of the rows of W + s B A; no gradient goes through them."""
    weight = module.weight.t() if module.adapter.transposed else module.weight
    product = module.lora_B.weight @ module.lora_A.weight
    norms: Tensor = torch.linalg.vector_norm(weight + module.adapter.scale * product, dim=1)
    return norms


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as in the Conv1D of GPT-2."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose forward is that of its class."""
    return runs_forward_of(module, nn.Linear) or (is_transposed(module) and not is_replaced(module))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have an adapter, by name."""
    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)  # it takes the weights of its children
        for child in module.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and id(module) not in inside and not {*PARTS} & {*name.split(".")}
    }


def find_targets(model: nn.Module, targets: tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
    """The layers that `targets` mean, by name, and packed experts with the names of matrices.

    Without targets that is every linear layer but the output. A target that names no linear layer
    means packed experts, or a matrix of theirs. A linear layer has no names of matrices.

    Raises:
        ModelError: a target means nothing, or the model has no linear layer.
    """
    layers = linear_layers(model)
    if not layers:
        raise ModelError(f"a {type(model).__name__} has no linear layer that an adapter fits")
    if targets is None:
        inner = [name for name, m in layers.items() if not _is_output(model, name, m)]
        return dict.fromkeys(inner or layers, ())
    targeted: dict[str, tuple[str, ...]] = {}
    experts: dict[str, tuple[str, ...]] | None = None
    for target in targets:
        meant = [name for name in layers if means(target, name)]
        targeted |= dict.fromkeys(meant, ())
        if not meant:
            experts = expert_adapters.find(model) if experts is None else experts
            named = expert_adapters.meant(target, experts)
            if not named:
                raise ModelError(_no_target(model, target, [*layers, *experts]))
            for name, keys in named.items():
                known = {*keys, *targeted.get(name, ())}
                targeted[name] = tuple(key for key in experts[name] if key in known)
    return {name: targeted[name] for name, _ in model.named_modules() if name in targeted}


def _is_output(model: nn.Module, name: str, module: nn.Module) -> bool:
    inner = getattr(model, "model", model)
    get = getattr(inner, "get_output_embeddings", None)
    output = get() if callable(get) else None
    return module is output or name.rpartition(".")[2] in OUTPUTS


def _no_target(model: nn.Module, target: str, layers: Sequence[str]) -> str:
    others = [(n, m) for n, m in model.named_modules() if n and means(target, n)]
    last = sorted({name.rpartition(".")[2] for name in layers})
    if others:
        name, module = others[0]
        kind = type(module).__name__
        what = f"'{name}' is a {kind}, and adapters go on linear layers and packed experts"
        return f"adapter.targets: {what}; known: {', '.join(last)}"
    return f"adapter.targets: no linear layer is called '{target}'; {nearest(target, last)}"


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if has_adapter(module)}


def coded_weights(model: nn.Module) -> dict[str, str]:
    """The frozen weights that a model wants kept in codes, by name, and the format of each.

    Outputs and adapters stay as they are, and so do weights that other modules use, too, as an
    embedding does.
    """
    bases = {module.adapter.base for module in adapted(model).values()} - {"none"}
    if not bases:
        return {}
    layers = linear_layers(model)
    known = {id(module) for module in layers.values()}
    others = {
        id(param)
        for module in model.modules()
        if id(module) not in known
        for param in module.parameters(recurse=False)
    }
    return {
        f"{name}.weight": min(bases)
        for name, module in layers.items()
        if not _is_output(model, name, module)
        and "weight" in module._parameters
        and not module.get_parameter("weight").requires_grad
        and id(module.get_parameter("weight")) not in others
    }


def magnitudes(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """For the weight of each DoRA layer, by name: the name of its magnitude, and whether the weight
    is [in, out].
    """
    return {
        f"{name}.weight": (f"{name}.lora_magnitude_vector.weight", module.adapter.transposed)
        for name, module in adapted(model).items()
        if module.adapter.kind == "dora"
    }


def merged(
    weight: Tensor, a: Tensor, b: Tensor, adapter: Adapter, magnitude: Tensor | None = None
) -> Tensor:
    """The weight of a layer that computes by itself what it did with its adapter, in the shape of
    `weight`.

    `weight` is [out, in], or [in, out] where the adapter is transposed; a [r, in], b [out, r],
    `magnitude` [out].
    """
    delta = adapter.scale * (b @ a)
    total = weight + (delta.t() if adapter.transposed else delta)
    if magnitude is None:
        return total
    factor = magnitude / row_norms(total, adapter.transposed)
    return total * (factor if adapter.transposed else factor[:, None])
