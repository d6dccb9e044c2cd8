"""The size of one operation on an axis, as the ledger counts it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Payload:
    """How large an operation is: what it is for, and what merely pads the buffer."""

    bytes: int
    padding_bytes: int = 0
    control: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, padding: int = 0, control: bool = False) -> Payload:
        """The size of a tensor whose last `padding` elements fill the buffer."""
        padding_bytes = padding * tensor.element_size()
        return cls(num_bytes(tensor) - padding_bytes, padding_bytes, control)


def num_bytes(tensor: Tensor) -> int:
    """The bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.element_size()
