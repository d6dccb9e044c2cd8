"""The chain of modules that a model's forward calls one after the other, where it has one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from plait import models
from plait.errors import ModelError
from plait.forwards import is_replaced, runs_forward_of

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""The tables of hooks of a module, and what their entries are called."""


def find_chain(model: nn.Module, chain: Sequence[str] | None) -> list[str]:
    """The links of a model: of the patterns given, of `CHAIN` in the file that defines it, or of a
    `Sequential`.

    A stage calls its links alone, and no module round them. Where such a module has a hook, or was
    given another forward, the model is no chain.

    Raises:
        ModelError: no module matches the patterns given, or they leave out a hook or a forward.
    """
    patterns = chain or getattr(sys.modules.get(type(model).__module__), "CHAIN", ())
    if patterns:
        found = models.links(model, tuple(patterns))
        if not found:
            raise ModelError(f"no module matches chain = {list(patterns)}")
        left_out = _left_out(model, found)
        if left_out and chain:
            raise ModelError(
                f"chain = {list(chain)} leaves out the {left_out}; leave chain out, so that the "
                "whole forward is cut, or put it on a module of the chain"
            )
        return [] if left_out else found
    return list(_flat(model, "")) if _only_calls_children(model) else []


def _flat(model: nn.Module, prefix: str) -> Iterator[str]:
    """The leaves of nested Sequentials."""
    for name, child in model.named_children():
        if type(child) is nn.Sequential and len(child) and _only_calls_children(child):
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _only_calls_children(module: nn.Module) -> bool:
    """Whether a module is a `Sequential` whose forward is that of the class, without a hook."""
    return runs_forward_of(module, nn.Sequential) and not _hook_of(module)


def _left_out(model: nn.Module, links: Sequence[str]) -> str:
    """The first hook or own forward of the model and modules round links; empty without any."""
    around = {""}
    for link in links:
        parts = link.split(".")
        around.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    for name in sorted(around):
        module = model.get_submodule(name)
        word = _hook_of(module) or ("own forward" if is_replaced(module) else "")
        if word:
            return f"{word} of {repr(name) if name else 'the model'}"
    return ""


def _hook_of(module: nn.Module) -> str:
    """The word for a hook of a module; empty where there is none."""
    return next((word for table, word in HOOKS.items() if getattr(module, table)), "")
