"""Records of all ranks on the first one, which judges them.

A record is all tensors of a run, and most are alike on several ranks. So the first rank tells the
digests of its own, and the others send only what it has not. A tensor travels as the bytes of its
array: torch's own pickling takes half a millisecond for each.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from plait.comm import World

T = TypeVar("T")
PLAIN = {torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool}
"""The types that arrays have too."""


def on_first_rank(world: World, own: T) -> list[T]:
    """The items of all ranks by rank, on the first rank; an empty list elsewhere. Collective.

    A tensor that another rank has too, to the last bit, is one tensor in both items. Equal tensors
    of one item, as a frozen weight before and after a step, stay apart.
    """
    axis = world.axis("world")
    if world.is_simulated or world.size == 1:
        items: list[T] = axis.gather_objects(own)
        return items if world.rank == 0 else []
    table = tensors_by_digest(own) if world.rank == 0 else {}
    known = axis.gather_objects(set(table))[0]
    packed = axis.gather_objects(b"" if world.rank == 0 else pack(own, known))
    return [own, *(unpack(one, table) for one in packed[1:])] if world.rank == 0 else []


def tensors_by_digest(item: object) -> dict[bytes, Tensor]:
    """The tensors of an item, of any shape, that others may name by their digest."""
    packer = _Packer(io.BytesIO(), None)
    packer.dump(item)
    return packer.found


def pack(item: object, known: set[bytes]) -> bytes:
    """Bytes of an item; tensors whose digest is known are named by it."""
    stream = io.BytesIO()
    _Packer(stream, known).dump(item)
    return stream.getvalue()


def unpack(packed: bytes, table: Mapping[bytes, Tensor]) -> Any:
    """The item whose bytes `pack` made, with the tensors of any shape that `table` knows. They come
    from this run's own ranks.
    """
    return _Unpacker(io.BytesIO(packed), table).load()


class _Packer(pickle.Pickler):
    """Pickles plain tensors of the host as arrays, or as digests; all else as usual.

    With `known` None every plain tensor is named by its digest.
    """

    def __init__(self, stream: io.BytesIO, known: set[bytes] | None) -> None:
        super().__init__(stream, protocol=5)
        self.found: dict[bytes, Tensor] = {}
        self._known = known

    def persistent_id(self, item: object) -> bytes | None:
        if type(item) is not Tensor or not _is_plain(item):
            return None
        digest = _digest(item)
        if self._known is None:
            self.found.setdefault(digest, item)
            return digest
        return digest if digest in self._known else None

    def reducer_override(
        self, item: object
    ) -> tuple[Callable[[np.ndarray], Tensor], tuple[np.ndarray]]:
        if type(item) is Tensor and _is_plain(item):
            return torch.from_numpy, (_array(item),)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    """Finds tensors by their digest. Equal tensors of one item stay tensors of their own."""

    def __init__(self, stream: io.BytesIO, table: Mapping[bytes, Tensor]) -> None:
        super().__init__(stream)
        self._table = table
        self._named: set[bytes] = set()

    def persistent_load(self, digest: bytes) -> Tensor:
        is_again = digest in self._named
        self._named.add(digest)
        return self._table[digest].clone() if is_again else self._table[digest]


def _is_plain(value: Tensor) -> bool:
    return (
        value.dtype in PLAIN
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
    )


def _array(value: Tensor) -> np.ndarray:
    array: np.ndarray = value.contiguous().numpy()
    return array


def _digest(value: Tensor) -> bytes:
    """Equal for tensors of equal type, shape and bits."""
    found = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    found.update(_array(value).reshape(-1).view(np.uint8).data)
    return found.digest()
