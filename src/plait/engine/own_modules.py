"""Modules without parameters that a file of Python keeps once for all models, as `ACT = nn.GELU()`.

An engine puts forwards of its own into the modules of its model. A module that two models have in
common would then compute for both as the one says. That happens where ranks are threads, and where
a reference is computed beside a model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import ModuleType

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def own_modules(model: nn.Module) -> None:
    """Replace such modules by copies. Those that hold tensors, or have hooks, stay."""
    files = {type(module).__module__ for module in model.modules()}
    kept = {id(one) for file in files for one in _kept(sys.modules.get(file)) if _is_bare(one)}
    copies: dict[int, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in kept:
                if id(child) not in copies:
                    copies[id(child)] = copy.deepcopy(child)
                module._modules[name] = copies[id(child)]


def _kept(file: ModuleType | None) -> Iterator[nn.Module]:
    """The modules of torch among the names of a file, and in its dicts, lists and tuples."""
    for value in [] if file is None else list(vars(file).values()):
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict):
            yield from (one for one in list(value.values()) if isinstance(one, nn.Module))
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, nn.Module))


def _is_bare(module: nn.Module) -> bool:
    has_tensors = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    has_hooks = any(getattr(one, name) for one in module.modules() for name in HOOKS)
    return not has_tensors and not has_hooks
