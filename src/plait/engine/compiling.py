"""`compile`: torch.compile of each repeated block, and of nothing around it.

A block repeats, so one graph serves all blocks. The engine's work around a block (gathering its
parameters, recomputing it) stays outside of the graph. Inside a block, a graph must be a pure
function of tensors. Modules that are no such function run as they are, between two graphs. They
talk to other ranks, draw random numbers, choose by values, or leave weight gradients for later.
"""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError, NotAvailable
from plait.forwards import give_forward
from plait.models.adapters import add_delta
from plait.models.experts import MixtureOfExperts
from plait.parallel.context.ring import RingAttention
from plait.parallel.context.ulysses import UlyssesAttention
from plait.parallel.tensor import dropout, layers
from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.values import PyTree

COMPILERS = ("c++", "g++", "clang++")
WRAPPED = "_orig_mod"
"""The name that the wrapper of torch.compile gives its module."""
TALKING = (
    layers.ParallelLinear,
    layers.ParallelEmbedding,
    layers.ParallelNorm,
    layers.ReplicatedLinear,
    RingAttention,
    UlyssesAttention,
    nn.SyncBatchNorm,
)


def apply(
    model: nn.Module,
    blocks: Sequence[str],
    *,
    backend: str = "inductor",
    device: torch.device | None = None,
    as_one: bool = False,
) -> None:
    """Compile the forward of each block, at its first call; `as_one`, where a block must not be
    several graphs.

    Raises ModelError or NotAvailable where that cannot be done.
    """
    if not blocks:
        raise ModelError(
            "compile works block by block, and this model names none; pass blocks='layers.*'"
        )
    on_cpu = device is None or device.type == "cpu"
    if backend == "inductor" and on_cpu and not any(shutil.which(name) for name in COMPILERS):
        raise NotAvailable(
            f"compile on the CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here; "
            "leave it out"
        )
    for name in blocks:
        block = model.get_submodule(name)
        if isinstance(block, nn.SyncBatchNorm):  # where layers repeat, it is a block of its own
            continue
        alone = [inner for inner, module in block.named_modules() if as_one and _is_alone(module)]
        if alone:
            raise ModelError(
                f"compile takes remat:selective as part of one graph, and '{name}.{alone[0]}' "
                "cannot be in a graph (it talks to other ranks, draws or chooses by values); take "
                "remat:full, or leave compile out"
            )
        give_forward(block, _compiled(block.forward, backend))


def warn_of_compiled(model: nn.Module, plan: Plan) -> None:
    """Tell once that graphs of the user's torch.compile end at each layer that ranks share."""
    sizes = (plan.tp.size, plan.pp.size, plan.cp.size, plan.ep)
    shares = STRATEGIES[plan.dp.strategy].shards_parameters or max(sizes) > 1
    if shares and any(map(_is_compiled, model.modules())):
        whole = plan if plan.compile else f"{plan} compile"
        warnings.warn(
            f"the model is compiled by torch.compile already, and '{plan}' works around each of "
            f"its layers, where these graphs end: pass the model as it was, with '{whole}', which "
            "compiles each block",
            stacklevel=3,
        )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def compiled_in_place(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, or has wrapped modules of; itself where it has not.

    Each such module stands in the place of its wrapper, compiled as by `module.compile()`. So names
    are those of the model, in checkpoints and in patterns.
    """
    for parent in [*model.modules()]:
        for key, child in parent._modules.items():
            if child is not None and WRAPPED in child._modules:
                parent._modules[key] = _unwrapped(child)
    return _unwrapped(model) if WRAPPED in model._modules else model


def _unwrapped(wrapper: Any) -> nn.Module:
    module: Any = wrapper._modules[WRAPPED]

    def called(*args: object, **kwargs: object) -> PyTree:
        return module._call_impl(*args, **kwargs)

    if not _is_compiled(module):
        # Hooks stay outside of the graph, which begins at the forward that `_call_impl` calls.
        # The compiler skips functions of torch itself, so for a Sequential it begins at `called`.
        is_of_torch = type(module).__module__.startswith("torch.nn.")
        module._compiled_call_impl = wrapper.dynamo_ctx(
            called if is_of_torch else module._call_impl
        )
    unwrapped: nn.Module = module
    return unwrapped


def _compiled(forward: Any, backend: str) -> Any:
    """The compiled forward of a block. Wrappers that communicate stay around the graph."""
    if getattr(forward, "stays_outside", False):
        return forward.wrapped_by(_compiled(forward.__wrapped__, backend))
    return torch.compile(forward, backend=backend)


def _is_alone(module: nn.Module) -> bool:
    """Whether a module talks to other ranks, draws random numbers, or chooses by the values that it
    sees.
    """
    return _drops(module) or isinstance(module, (*TALKING, MixtureOfExperts))


def _drops(module: nn.Module) -> bool:
    """Whether a module is a dropout, or has a dropout rate for the function that its attention
    calls.
    """
    if isinstance(module, nn.Dropout | dropout.Dropout):
        return module.p > 0
    rates = [
        value
        for name, value in vars(module).items()
        if "dropout" in name and isinstance(value, float)
    ]
    inner = module._modules.get("attn_dropout")
    return any(rate > 0 for rate in [*rates, getattr(inner, "p", 0.0)])


def leave_out(model: nn.Module, blocks: Sequence[str]) -> None:
    """Keep modules that are no function of tensors out of the graphs. Call this when every module
    is final.
    """
    for name in blocks:
        for inner, module in model.get_submodule(name).named_modules():
            if inner and ("forward" in vars(module) or _is_alone(module)):
                _run_alone(module)
            if inner:
                _hooks_alone(module)


def _run_alone(module: nn.Module) -> None:
    """Leave a module out of the graph by its class, which all blocks share.

    A mark on each module would make a graph for every block.
    """
    own = vars(module).pop("forward", None)
    if own is not None:
        module.own_forward = own
    kind: Any = type(module)
    module.__class__ = _alone(kind, own is not None)


@functools.cache
def _alone(kind: Any, own: bool) -> Any:
    def forward(self: Any, *args: object, **kwargs: object) -> PyTree:
        return self.own_forward(*args, **kwargs) if own else kind.forward(self, *args, **kwargs)

    return type(
        kind.__name__, (kind,), {"forward": _untraced(forward), "__module__": kind.__module__}
    )


def _hooks_alone(module: nn.Module) -> None:
    """Keep the hooks of a module (a gathering of the sequence, positions) out of the graphs too.

    The hook of an adapter without dropout stays, since it is a function of tensors.
    """
    adapter: Any = getattr(module, "adapter", None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if hook is not add_delta or adapter.dropout:
                hooks[key] = _untraced(hook)


def _untraced(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    plain: Callable[..., PyTree] = torch.compiler.disable(function)
    return plain
