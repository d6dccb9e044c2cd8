"""Notes on tensors, which do not keep their memory."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Note = TypeVar("Note")


class Notes(Generic[Note]):
    """A note on each of some tensors [...], by the object and not by its numbers."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Note]] = {}

    def add(self, tensor: Tensor, note: Note) -> None:
        """Note something of a tensor [...], in place of what was noted before."""
        self._known[id(tensor)] = weakref.ref(tensor), note

    def discard(self, tensor: Tensor) -> None:
        """Forget a tensor [...]."""
        self._known.pop(id(tensor), None)

    def get(self, tensor: Tensor) -> Note | None:
        """The note on a tensor [...]; None where there is none."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None
