"""Text as bytes: the user's files, or the source of Python's standard library, which every machine has.

The vocabulary is the 256 bytes, so nothing has to be learnt, downloaded or stored. A sample is a window of seq_len + 1
bytes; windows stand side by side, a last one that is not full is left out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.errors import DataError

VOCAB_SIZE = 256
STDLIB_BYTES = 4 * 2**20
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """(input_ids [S], labels [S]) from one uint8 tensor; the labels are one byte ahead."""

    def __init__(self, corpus: Tensor, seq_len: int) -> None:
        self.seq_len = seq_len
        self.windows = corpus.unfold(0, seq_len + 1, seq_len)  # a view: the label of one window's end begins the next

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S]), in one gather."""
        windows = self.windows[indices].long()
        return windows[:, :-1], windows[:, 1:]


def text(files: Sequence[str | Path], seq_len: int) -> Windows:
    """The files one after the other. Raises `DataError` for a file that is missing, unreadable or empty, or a short corpus."""
    if not files:
        raise DataError('data "text" needs files = ["path", ...]')
    contents = [read(Path(file)) for file in files]
    num_bytes = sum(map(len, contents))
    if num_bytes < seq_len + 1:
        names = ", ".join(repr(str(file)) for file in files)
        raise DataError(f"{names}: {num_bytes} bytes are too few for one window of seq_len + 1 = {seq_len + 1}")
    return Windows(torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8), seq_len)


def read(path: Path) -> bytes:
    """The bytes of a file that has some."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise DataError(f"the data file {str(path)!r} cannot be read: {failure.strerror}") from failure
    if not content:
        raise DataError(f"the data file {str(path)!r} is empty")
    return content


def stdlib(seq_len: int, *, max_bytes: int = STDLIB_BYTES) -> Windows:
    """The first `max_bytes` of the standard library's modules in the order of their paths; packages of tests left out.

    It is the same on every machine with the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts[:-1]))
    corpus = bytearray()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        corpus += path.read_bytes()
        if len(corpus) >= max_bytes:
            break
    if len(corpus) < seq_len + 1:
        raise DataError(f"{str(root)!r} holds {len(corpus)} bytes of Python source, fewer than seq_len + 1 = {seq_len + 1}")
    return Windows(torch.frombuffer(corpus[:max_bytes], dtype=torch.uint8), seq_len)
