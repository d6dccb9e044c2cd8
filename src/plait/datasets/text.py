"""Text as bytes: the user's files, or the source of Python's standard library, which every machine
has.

The vocabulary is the 256 bytes, so nothing has to be learnt, downloaded or stored. A sample is a
window of seq_len + 1 bytes. Windows stand side by side, and an incomplete last one is left out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.errors import DataError
from plait.values import PyTree

VOCAB_SIZE = 256
IGNORE = -100  # the label that counts for nothing
STDLIB_BYTES = 4 * 2**20
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


class Windows(Dataset[tuple[PyTree, Tensor]]):
    """(input_ids [S], labels [S]) from one uint8 tensor; the labels are one byte ahead."""

    def __init__(self, corpus: Tensor, seq_len: int) -> None:
        self.seq_len = seq_len
        self.windows = corpus.unfold(
            0, seq_len + 1, seq_len
        )  # a view: the label of one window's end begins the next
        self._corpus = corpus

    @cached_property
    def content(self) -> int:
        """A number that follows from all bytes."""
        return int.from_bytes(self._digest().digest(), "little") >> 2

    def _digest(self) -> hashlib.blake2b:
        return hashlib.blake2b(self._corpus.numpy().data, digest_size=8)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[PyTree, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]

    def batch(self, indices: Tensor) -> tuple[PyTree, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S]), in one gather."""
        windows = self.windows[indices].long()
        return windows[:, :-1], windows[:, 1:]


class Packed(Windows):
    """((input_ids [S], documents [S]), labels [S]): windows that know which file each byte is from.

    Files are packed without padding. No byte sees, or is guessed from, another file. The label of a
    file's last byte counts for nothing.
    """

    def __init__(self, corpus: Tensor, seq_len: int, lengths: Sequence[int]) -> None:
        super().__init__(corpus, seq_len)
        self._ends = torch.tensor(lengths).cumsum(0)

    def _digest(self) -> hashlib.blake2b:
        digest = super()._digest()
        digest.update(self._ends.numpy().data)
        return digest

    def __getitem__(self, index: int) -> tuple[PyTree, Tensor]:
        (inputs, documents), labels = self.batch(torch.tensor([index]))
        return (inputs[0], documents[0]), labels[0]

    def batch(self, indices: Tensor) -> tuple[PyTree, Tensor]:
        """Samples [B] -> ((input_ids [B, S], documents [B, S]), labels [B, S])."""
        inputs, labels = super().batch(indices)
        places = indices[:, None] * self.seq_len + torch.arange(self.seq_len + 1)
        documents = torch.searchsorted(self._ends, places, right=True)
        return (inputs, documents[:, :-1]), labels.masked_fill(
            documents[:, 1:] != documents[:, :-1], IGNORE
        )


class TextLines:
    """The lines of a text as documents of bytes, each with its end; blank ones are left out."""

    def __init__(self, content: bytes) -> None:
        lines = [line for line in content.splitlines(keepends=True) if line.strip()]
        self._bytes = torch.frombuffer(
            bytearray(b"".join(lines)) or bytearray(1), dtype=torch.uint8
        )
        self.lengths = torch.tensor([len(line) for line in lines], dtype=torch.int64)
        self._ends = self.lengths.cumsum(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        end = int(self._ends[index])
        return {"input_ids": self._bytes[end - int(self.lengths[index]) : end].long()}


def text(files: Sequence[str | Path], seq_len: int, *, packed: bool = False) -> Windows:
    """The files one after the other; `packed`: as documents that do not see each other.

    Raises `DataError` for a file that is missing, unreadable or empty, or a short corpus.
    """
    contents = contents_of(files)
    num_bytes = sum(map(len, contents))
    if num_bytes < seq_len + 1:
        names = ", ".join(repr(str(file)) for file in files)
        raise DataError(
            f"{names}: {num_bytes} bytes are too few for one window of seq_len + 1 = {seq_len + 1}"
        )
    corpus = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    return (
        Packed(corpus, seq_len, [len(content) for content in contents])
        if packed
        else Windows(corpus, seq_len)
    )


def contents_of(files: Sequence[str | Path]) -> list[bytes]:
    """The bytes of each file. Raises `DataError` for none, and for a file that cannot be read."""
    if not files:
        raise DataError('data "text" needs files = ["path", ...]')
    return [read(Path(file)) for file in files]


def read(path: Path) -> bytes:
    """The bytes of a file. Raises `DataError` for one that is empty or cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise DataError(
            f"the data file {str(path)!r} cannot be read: {failure.strerror}"
        ) from failure
    if not content:
        raise DataError(f"the data file {str(path)!r} is empty")
    return content


def stdlib(seq_len: int, *, max_bytes: int = STDLIB_BYTES, packed: bool = False) -> Windows:
    """The first `max_bytes` of the standard library's own modules, each directory's before those of
    its subdirectories.

    It depends on the version of Python, and not on what is installed beside it.

    Raises:
        DataError: fewer bytes than one sample needs.
    """
    root = Path(sysconfig.get_path("stdlib"))
    contents = contents_of_stdlib(root, max_bytes)
    lengths = [len(content) for content in contents]
    corpus = bytearray(b"".join(contents))
    if len(corpus) < seq_len + 1:
        raise DataError(
            f"{str(root)!r} holds {len(corpus)} bytes of Python source, fewer than seq_len + 1 = "
            f"{seq_len + 1}"
        )
    tensor = torch.frombuffer(corpus[:max_bytes], dtype=torch.uint8)
    return Packed(tensor, seq_len, lengths) if packed else Windows(tensor, seq_len)


def contents_of_stdlib(root: Path, max_bytes: int = STDLIB_BYTES) -> list[bytes]:
    """The first modules of the standard library in `root` that have `max_bytes` together."""
    contents = []
    num_bytes = 0
    for path in sources(root):
        contents.append(path.read_bytes())
        num_bytes += len(contents[-1])
        if num_bytes >= max_bytes:
            break
    return contents


def lines(files: Sequence[str | Path] | None) -> TextLines:
    """The lines of the files, or of the standard library, as documents."""
    if files is None:
        contents = contents_of_stdlib(Path(sysconfig.get_path("stdlib")))
        return TextLines(b"".join(contents)[:STDLIB_BYTES])
    return TextLines(
        b"".join(
            content if content.endswith(b"\n") else content + b"\n"
            for content in contents_of(files)
        )
    )


def sources(directory: Path) -> Iterator[Path]:
    """Python files by name, then those of the subdirectories by name; without tests and what a
    machine adds.
    """
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    for path in entries:
        if path.suffix == ".py" and not path.name.startswith(SKIPPED_FILES) and path.is_file():
            yield path
    for path in entries:
        if path.is_dir() and path.name not in SKIPPED:
            yield from sources(path)
