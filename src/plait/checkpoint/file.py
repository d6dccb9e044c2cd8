"""One safetensors file, written as a stream and read as a map of memory, with a checksum of every
block.

The library's own writer copies all tensors of a device to the host together, and gives neither
checksum nor fsync. The format is simple, so it is written here, one tensor at a time. Any
safetensors reader opens it. The checksums are the last tensor of the
file: the CRC-32 of each block of the data before it. A reader checks the blocks that it touches and
no others.

    u64 length | header (JSON, padded with blanks to 8) | data of the tensors, widest type first |
    u32 checksums
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.values import JsonObject

CHECKSUMS = "checksums/crc32"
BLOCK_BYTES = 1 << 20
_HOST_BYTES = 64 << 20  # of a tensor on a device, how much is on the host at a time

# The names of the safetensors format; a type that is not here is not saved.
FORMAT_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FORMAT_NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}

Do = Callable[[Callable[[], None]], None]
"""The way in which something is done: here and now, or by another thread."""

Declared = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor before its values: name, type, shape


def format_name(name: str, dtype: torch.dtype) -> str:
    """The format's word for a type. Errors: `CheckpointError` when it has none."""
    if dtype not in FORMAT_NAMES:
        raise CheckpointError(
            f"'{name}' is {dtype}, which the safetensors format does not know; convert it first"
        )
    return FORMAT_NAMES[dtype]


def file_order(declared: Sequence[Declared]) -> list[int]:
    """The order in which tensors stand in a file: widest type first, so that every element is
    aligned.
    """
    return sorted(range(len(declared)), key=lambda index: -declared[index][1].itemsize)


def call(act: Callable[[], None]) -> None:
    """Do something here and now."""
    act()


def runs(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in their order; those that follow each other in one host memory stand together.

    >>> both = torch.arange(6.0)
    >>> [len(run) for run in runs([both[:2], both[2:], both[:2]])]
    [2, 1]
    """
    groups: list[list[Tensor]] = []
    end: tuple[int, int] | None = None  # the memory, and where its part so far ends
    for tensor in tensors:
        if groups and not tensor.numel():  # it has no place in memory, and no bytes
            groups[-1].append(tensor)
            continue
        is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
        start = tensor.data_ptr()
        memory = tensor.untyped_storage().data_ptr()
        if is_plain and end == (memory, start):
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = (memory, start + tensor.nbytes) if is_plain else None
    return groups


def memory_of(run: Sequence[Tensor]) -> memoryview:
    """The bytes of tensors of any shape that follow each other in memory."""
    storage = run[0].untyped_storage()
    start = run[0].data_ptr() - storage.data_ptr()
    count = sum(tensor.nbytes for tensor in run)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, start, (count,), (1,))
    return flat.numpy().data


class FileWriter:
    """Writes the tensors that `declared` names, in `file_order`, with or without checksums. Use as
    a context manager.

    On leaving without an error the file is complete and durable. `size_bytes` and `checksum` say
    what a whole file must have; the checksum covers the header, which no block holds.
    """

    def __init__(
        self,
        path: Path,
        declared: Sequence[Declared],
        metadata: Mapping[str, str],
        checksums: bool = True,
    ) -> None:
        self.path = path
        self.size_bytes = 0
        self._checksums = checksums
        self._expected = [declared[index] for index in file_order(declared)]
        self._next = 0
        self._data_bytes = 0
        self._block_crc = 0
        self._blocks: list[int] = []
        header = self._make_header(dict(metadata))
        self.checksum = zlib.crc32(header)
        self._file = path.open("wb")
        self._write(header)

    def _make_header(self, metadata: dict[str, str]) -> bytes:
        entries: JsonObject = {"__metadata__": metadata}
        offset = 0
        for name, dtype, shape in self._expected:
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            entries[name] = {
                "dtype": format_name(name, dtype),
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        if len(entries) != len(self._expected) + 1:
            raise CheckpointError(f"{self.path}: two tensors have one name")
        if self._checksums:
            # U8, because the data before it need not end on a multiple of four
            size = 4 * -(-offset // BLOCK_BYTES)
            entries[CHECKSUMS] = {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [offset, offset + size],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor's elements, of any shape and from any device, without a second copy
        of them in memory.
        """
        self._expect(tensor)
        flat = tensor.detach().reshape(-1)
        step = max(1, _HOST_BYTES // tensor.dtype.itemsize)
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step].cpu().contiguous()
            part = part.as_strided(
                part.shape, (1,)
            )  # one element counts as contiguous with any stride, but has no bytes
            self._write_data(part.view(torch.uint8).numpy().data)

    def write_all(self, tensors: Sequence[Tensor], do: Do = call) -> None:
        """Write all tensors that are declared, in `file_order` and of any shape. `do` does the work
        on the bytes.

        Those that lie one after the other in the memory of the host are written as one.
        """
        for run in runs(tensors):
            if len(run) == 1 or not run[0].numel():
                for tensor in run:
                    do(partial(self.write, tensor))
                continue
            for tensor in run:
                self._expect(tensor)
            do(partial(self._write_data, memory_of(run)))

    def _expect(self, tensor: Tensor) -> None:
        """Take a tensor for the next one. Errors: `CheckpointError` where it is another."""
        name, dtype, shape = self._expected[self._next]
        if tensor.dtype != dtype or tensor.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"'{name}' was declared as {dtype} {shape} and is {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        self._next += 1

    def _write_data(self, data: memoryview) -> None:
        """Write bytes block by block. The checksum finds each block in the cache.

        For tens of megabytes at once the system may take ten times as long.
        """
        while len(data):
            part = data[: BLOCK_BYTES - self._data_bytes % BLOCK_BYTES]
            self._write(part)
            if self._checksums:
                self._block_crc = zlib.crc32(part, self._block_crc)
            self._data_bytes += len(part)
            data = data[len(part) :]
            if self._checksums and self._data_bytes % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._block_crc)
        self._block_crc = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.size_bytes += len(data)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is not None:
                return
            if self._next != len(self._expected):
                raise CheckpointError(
                    f"{self.path}: {self._next} of {len(self._expected)} tensors were written"
                )
            if self._checksums:
                if self._data_bytes % BLOCK_BYTES:
                    self._end_block()
                table = b"".join(crc.to_bytes(4, "little") for crc in self._blocks)
                self._write(table)
            self._file.flush()
            os.fsync(self._file.fileno())


class FileReader:
    """A file of `FileWriter` as a private map of memory: only the pages that are used are read.

    Raises:
        CheckpointError: the header is not the one that `checksum` was made of. The message is the
            bare fact; the caller, who knows the checkpoint, adds the cure.
    """

    def __init__(self, path: Path, checksum: int) -> None:
        self.path = path
        with path.open("rb") as file:
            # a private map is writable (never to the file), which is what torch asks of memory that
            # it looks into
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._base = 8 + int.from_bytes(self._map[:8], "little")
        if self._base > len(self._map) or zlib.crc32(self._map[: self._base]) != checksum:
            raise CheckpointError(f"{path} is damaged: the checksum of its header is wrong")
        try:
            self._read_header()
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} cannot be right: its header has a fault ({error})"
            ) from error

    def _read_header(self) -> None:
        """Where each tensor lies, and the checksums. Errors: `ValueError`, `TypeError`,
        `KeyError`.
        """
        self._entries: JsonObject = json.loads(self._map[8 : self._base])
        self._data_bytes, end = self._entries.pop(CHECKSUMS)["data_offsets"]
        num_blocks = -(-self._data_bytes // BLOCK_BYTES)
        if end - self._data_bytes != 4 * num_blocks or self._base + end != len(self._map):
            raise ValueError("its checksums do not fit its data")
        table = self._map[self._base + self._data_bytes : self._base + end]
        self._blocks = [
            int.from_bytes(table[at : at + 4], "little") for at in range(0, len(table), 4)
        ]
        self._checked = bytearray(len(self._blocks))
        self.metadata: dict[str, str] = self._entries.pop("__metadata__")
        for name, entry in self._entries.items():
            low, high = entry["data_offsets"]
            width = FORMAT_DTYPES[entry["dtype"]].itemsize
            aligned = (self._base + low) % width == 0
            if not (0 <= low <= high <= self._data_bytes and aligned):
                raise ValueError(f"'{name}' lies at bytes {low} to {high}")
            if high - low != width * math.prod(entry["shape"]):
                raise ValueError(f"'{name}' of shape {entry['shape']} has {high - low} bytes")

    def form(self, name: str) -> tuple[torch.dtype, int]:
        """The type and the number of elements of a tensor of the file."""
        entry = self._entries[name]
        return FORMAT_DTYPES[entry["dtype"]], math.prod(entry["shape"])

    def tensor(self, name: str) -> Tensor:
        """A tensor (numel,) of the file as a view of the map: nothing is read yet, and nothing
        checked.
        """
        entry = self._entries[name]
        dtype = FORMAT_DTYPES[entry["dtype"]]
        low, high = entry["data_offsets"]
        if low == high:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(
            self._map, dtype=dtype, count=(high - low) // dtype.itemsize, offset=self._base + low
        )

    def check(self, name: str, start: int, stop: int) -> None:
        """Compare the checksums of the blocks that hold elements [start, stop) of a tensor, each
        block once.

        Raises:
            CheckpointError: a block is not what was written.
        """
        entry = self._entries[name]
        low = entry["data_offsets"][0]
        width = FORMAT_DTYPES[entry["dtype"]].itemsize
        self._check_bytes(low + start * width, low + stop * width)

    def check_all(self) -> None:
        """Compare all checksums."""
        self._check_bytes(0, self._data_bytes)

    def _check_bytes(self, low: int, high: int) -> None:
        for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            if self._checked[block]:
                continue
            first = block * BLOCK_BYTES
            last = min((block + 1) * BLOCK_BYTES, self._data_bytes)
            if (
                zlib.crc32(memoryview(self._map)[self._base + first : self._base + last])
                != self._blocks[block]
            ):
                raise CheckpointError(
                    f"{self.path} is damaged: the checksum of its bytes {self._base + first} to "
                    f"{self._base + last} is wrong"
                )
            self._checked[block] = 1
