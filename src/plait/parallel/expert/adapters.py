"""Low-rank adapters on experts of one tensor [E, out, in], or put around them by PEFT.

The matrices hold those of all E experts. A [E r, in] has one expert behind the other, B [out, r E]
has the experts innermost. Each rank of the expert axis keeps those of its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from plait.mesh.boxes import Box

INNER = ".base_layer"
"""The end of the name of a module that an adapter is wrapped around."""


def around(model: nn.Module, name: str) -> dict[str, Any]:
    """The adapters around the experts called `name`, by name; they may be nested."""
    wrappers: dict[str, Any] = {}
    while name.endswith(INNER):
        name = name.removesuffix(INNER)
        wrapper = model.get_submodule(name)
        if hasattr(wrapper, "lora_A") and hasattr(wrapper, "num_experts"):
            wrappers[name] = wrapper
    return wrappers


def matrices(name: str, owner: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The name of each matrix of an adapter, its module, and whether experts are outermost (0) or
    innermost (1) in it. None for a module without an adapter.
    """
    for place, word in enumerate(("lora_A", "lora_B")):
        table = owner._modules.get(word)
        if not isinstance(table, nn.ModuleDict):
            continue
        for key, linear in table.items():
            yield f"{name}.{word}.{key}", linear, place


def cut_of(
    shape: tuple[int, ...], place: int, num_experts: int, rank: int, size: int
) -> tuple[tuple[int, ...], Box, tuple[int, ...]]:
    """A view of a matrix with the experts apart, a rank's box in it, and that rank's shape.

    `shape` is (E r, in) where experts are outermost (`place` 0), and (out, r E) where they are
    innermost (1). The view is (E, r, in) or (out, r, E).
    """
    each = num_experts // size
    first, second = shape
    if place == 0:
        view: tuple[int, ...] = (num_experts, first // num_experts, second)
        box = Box((rank * each, 0, 0), (each, *view[1:]))
        return view, box, (first // size, second)
    view = (first, second // num_experts, num_experts)
    box = Box((0, 0, rank * each), (*view[:2], each))
    return view, box, (first, second // size)
