"""Messages to and from a client daemon: numbers and names as JSON, vectors as bytes.

No pickle, no torch.

A statement is `(head, vectors)`. The same form travels over a local socket (this file) and inside
Flower's messages (`flower`). One message holds all that a client can send.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.values import JsonMapping, JsonObject

Head = JsonObject
Vectors = dict[str, NDArray[Any]]
DTYPES = ("float32", "float64", "int64")
LIMIT_BYTES = 1 << 26  # of a head


def pack(head: JsonMapping, vectors: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a statement: length of the JSON, the JSON, the vectors end to end. Raises
    `ValueError` for other types.
    """
    listed = []
    for name, vector in vectors.items():
        if vector.ndim != 1 or str(vector.dtype) not in DTYPES:
            raise ValueError(
                f"'{name}' is {vector.dtype} of {vector.ndim} dimensions; vectors of "
                f"{', '.join(DTYPES)} travel"
            )
        listed.append([name, str(vector.dtype), vector.size])
    text = json.dumps({"head": dict(head), "vectors": listed}, allow_nan=False).encode()
    return (
        struct.pack(">Q", len(text))
        + text
        + b"".join(np.ascontiguousarray(v).tobytes() for v in vectors.values())
    )


def send(line: socket.socket, head: JsonMapping, vectors: Mapping[str, NDArray[Any]]) -> None:
    """Write one statement: the head as JSON, then the vectors, without pickle."""
    line.sendall(pack(head, vectors))


def receive(line: socket.socket) -> tuple[Head, Vectors]:
    """Read a statement. Raises `ConnectionError` when the other end is gone and `ValueError` for
    what `pack` never makes.
    """
    (length,) = struct.unpack(">Q", _read(line, 8))
    if length > LIMIT_BYTES:
        raise ValueError(f"a head of {length} bytes")
    statement = json.loads(_read(line, length))
    vectors: Vectors = {}
    for name, dtype, size in statement["vectors"]:
        if dtype not in DTYPES:
            raise ValueError(f"'{name}' is {dtype}")
        kind = np.dtype(dtype)
        vectors[str(name)] = np.frombuffer(_read(line, int(size) * kind.itemsize), kind)
    return statement["head"], vectors


def _read(line: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = line.recv_into(view[done:])
        if not count:
            raise ConnectionError("the other end is gone")
        done += count
    return data
