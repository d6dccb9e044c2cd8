"""The payload from one stage to the next: tensors, and a note that says how to assemble them.

The note and the shapes are sent once and remembered; see `transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from plait.errors import ModelError

SENDABLE = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


@dataclass
class Payload:
    """Tensors between two stages, for one micro-batch.

    `note` is small, picklable, and the same whenever the inputs of the model have the same shapes.
    `restore` puts the random state back to where the stage before left it, `random`, if it is not
    the state of now.
    """

    tensors: list[Tensor]
    note: Any = None
    restore: Callable[[], None] = field(default=lambda: None)
    random: Tensor | None = None


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype that a receiver must know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor that is to be sent."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def pack(value: Any, what: str) -> Payload:
    """Any nesting of tensors (and None) as a payload. Raises ModelError for anything that cannot be
    sent.
    """
    leaves, structure = tree_flatten(value)
    for leaf in leaves:
        if leaf is not None:
            check_sendable(leaf, what)
    places = iter(range(len(leaves)))
    skeleton = tree_unflatten(
        [None if leaf is None else next(places) for leaf in leaves], structure
    )
    return Payload([leaf for leaf in leaves if leaf is not None], skeleton)


def unpack(payload: Payload) -> Any:
    """The value that `pack` made the payload from."""
    return tree_map(lambda place: None if place is None else payload.tensors[place], payload.note)


def check_sendable(leaf: Any, what: str) -> None:
    """Raise ModelError unless `leaf` is a dense tensor of a dtype that travels."""
    if not isinstance(leaf, Tensor):
        raise ModelError(
            f"{what} returns a {type(leaf).__name__} where a stage ends; only tensors, and any "
            "nesting of them, can be sent to "
            "the next stage: cut elsewhere (counts, splits), or keep the value inside a block"
        )
    if leaf.layout is not torch.strided or leaf.dtype not in SENDABLE:
        kind = str(leaf.dtype if leaf.dtype not in SENDABLE else leaf.layout).removeprefix("torch.")
        raise ModelError(
            f"{what} returns a {kind} tensor where a stage ends, which cannot be sent; cut "
            "elsewhere (counts, splits)"
        )
