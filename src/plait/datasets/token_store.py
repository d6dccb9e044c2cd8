"""Tokens of rows, made once and kept in files under a key of their content.

The key follows from the files (size, time, first bytes), the tokenizer and the settings. A folder
of tokens appears whole or not at all. Without a folder to write to, the tokens stay in memory. A
full disk ends the run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from plait.cache_folder import cache_folder
from plait.datasets.documents import LABELLED, DocumentFacts, Documents, Numbers
from plait.datasets.rows import Row, RowSource
from plait.datasets.tokenizer import BadRow, Encoded, Tokenizer
from plait.errors import DataError, RunError
from plait.values import JsonObject

VERSION: Final = 2
HEAD_BYTES: Final = 1 << 16
BATCH: Final = 512
SHOWN: Final = 10
QUIET_SECONDS: Final = 2.0
"""Seconds of work before a line of progress is written, and between two lines."""
FACTS: Final = "facts.json"
TOKENS: Final = "tokens.bin"
LEARNT: Final = "learnt.bin"
ENDS: Final = "ends.npy"


class StoreFailed(Exception):
    """The cache cannot be written; the reason is the system's.

    Attributes:
        is_full: there is a place to write, and no room.
    """

    def __init__(self, failure: OSError) -> None:
        super().__init__(failure.strerror or str(failure))
        self.is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Making:
    """The tokens that a tokenizer makes of rows, with bad rows up to a number left out."""

    rows: RowSource
    tokenizer: Tokenizer
    skip_bad: int = 0

    @property
    def key(self) -> str:
        """A name that changes with the files, the tokenizer and the settings."""
        digest = hashlib.blake2b(digest_size=20)
        about = [VERSION, sorted(self.rows.settings.items()), self.tokenizer.fingerprint]
        digest.update(repr(about).encode())
        for path in self.rows.files:
            digest.update(_fingerprint(path))
        return digest.hexdigest()


def documents(making: Making, cache: Path | None = None) -> Documents:
    """The documents of rows: those that are kept, else made and kept.

    Errors: `DataError` for bad rows, `RunError` for a full disk under the cache.
    """
    folder = cache.expanduser() if cache is not None else cache_folder() / "tokens"
    made_of_rows = folder / making.key
    if not (made_of_rows / FACTS).is_file():
        try:
            with _alone(made_of_rows):
                if not (made_of_rows / FACTS).is_file():
                    _keep(making, made_of_rows)
        except StoreFailed as failure:
            if failure.is_full:
                raise RunError(
                    f"tokens cannot be kept in {folder}: {failure}; free some, or name a folder "
                    "with room by data.cache"
                ) from failure
            print(
                f"warning: tokens cannot be kept in {folder}: {failure}; they stay in memory, and "
                "every process makes its own",
                file=sys.stderr,
                flush=True,
            )
            return _checked(making, _in_memory(making))
    return _checked(making, opened(made_of_rows))


def opened(kept: Path) -> Documents:
    """The documents of a folder, mapped into memory. Raises `DataError` where it is damaged."""
    try:
        about = json.loads((kept / FACTS).read_text())
        facts = DocumentFacts(**{**about["facts"], "bad": tuple(about["facts"]["bad"])})
        tokens = _mapped(kept / TOKENS, about["dtype"], about["num_tokens"])
        ends = np.load(kept / ENDS, mmap_mode="r")
        has_learnt = (kept / LEARNT).is_file()
        learnt = _mapped(kept / LEARNT, "uint8", about["num_tokens"]) if has_learnt else None
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise DataError(
            f"the kept tokens in {str(kept)!r} cannot be read ({failure}); remove that folder"
        ) from failure
    return Documents(tokens, ends, learnt, facts)


def _mapped(path: Path, dtype: str, size: int) -> Numbers:
    """A file of so many numbers as an array."""
    if path.stat().st_size != size * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} is not whole")
    if size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(size,))


def _checked(making: Making, found: Documents) -> Documents:
    """The documents, unless there are none or more bad rows than are allowed."""
    facts = found.facts
    if facts.num_bad > making.skip_bad:
        raise _refusal(facts.bad[min(making.skip_bad, len(facts.bad) - 1)], making.skip_bad)
    if len(found) == 0:
        raise DataError(f"{making.rows.name}: there is no document in it")
    return found


def _refusal(sentence: str, skip_bad: int) -> DataError:
    if skip_bad == 0:
        return DataError(f"{sentence}; mend the row, or allow N such rows by skip_bad = N")
    return DataError(f"{sentence}: more bad rows than skip_bad = {skip_bad}")


def _keep(making: Making, kept: Path) -> None:
    """Make the tokens in a folder beside, which then takes its name."""
    unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        with _storing():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            with (
                (unfinished / TOKENS).open("wb") as tokens,
                (unfinished / LEARNT).open("wb") as learnt,
            ):
                writer = _TokenWriter(making, tokens, learnt)
                writer.fill()
            if not writer.facts.has_labels:
                (unfinished / LEARNT).unlink()
            np.save(unfinished / ENDS, writer.all_ends)
            (unfinished / FACTS).write_text(json.dumps(writer.about))
            unfinished.rename(kept)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _in_memory(making: Making) -> Documents:
    tokens = BytesIO()
    learnt = BytesIO()
    writer = _TokenWriter(making, tokens, learnt)
    writer.fill()
    return Documents(
        np.frombuffer(tokens.getbuffer(), dtype=writer.dtype),
        writer.all_ends,
        np.frombuffer(learnt.getbuffer(), dtype=np.uint8) if writer.facts.has_labels else None,
        writer.facts,
    )


class _TokenWriter:
    """Where the tokens of rows go, document after document."""

    def __init__(self, making: Making, tokens: IO[bytes], learnt: IO[bytes]) -> None:
        self._making = making
        self._tokens = tokens
        self._learnt = learnt
        self._ends = array("q")
        self._digest = hashlib.blake2b(digest_size=8)
        self._bad: list[str] = []
        self._progress = _Counter(making.rows.name)
        self._num_tokens = 0
        self._max_token = 0
        self._num_bad = 0
        self._kind = ""
        self.dtype = _dtype_of(making.tokenizer.vocab_size)

    def fill(self) -> None:
        """Take all rows. Raises `DataError` for the first bad row that is not to be left out."""
        rows = iter(self._making.rows)
        while batch := list(islice(rows, BATCH)):
            good = [row for row in batch if self._is_good(row)]
            texts = [row.value for row in good if isinstance(row.value, str)]
            encoded = iter(self._making.tokenizer.encode(texts) if texts else ())
            for row in good:
                if isinstance(row.value, str):
                    self._add(next(encoded))
                else:
                    self._add_numbers(row)
            self._progress.show(len(self._ends), self._num_tokens)
        with _storing():
            self._tokens.flush()
            self._learnt.flush()
        self._progress.end(len(self._ends), self._num_tokens)

    def _add_numbers(self, row: Row) -> None:
        """A list of tokens, or a conversation."""
        if isinstance(row.value[0], int):
            self._add(Encoded(row.value, row.learnt))
            return
        try:
            self._add(self._making.tokenizer.converse(row.value))
        except BadRow as failure:
            self._leave_out(f"{row.place}: {failure}")

    def _is_good(self, row: Row) -> bool:
        """Whether a row can be read and is of the kind of the first one."""
        if row.fault:
            self._leave_out(f"{row.place}: {row.fault}")
            return False
        if not row.value:
            return False
        if not self._kind:
            self._kind = row.kind
            if self._kind in ("tokens", LABELLED):
                self.dtype = np.dtype(np.uint32)
        if row.kind != self._kind:
            self._leave_out(f"{row.place}: this is {row.kind}, and the first row is {self._kind}")
            return False
        return True

    def _leave_out(self, sentence: str) -> None:
        self._num_bad += 1
        if self._num_bad > self._making.skip_bad:
            raise _refusal(sentence, self._making.skip_bad)
        if len(self._bad) < SHOWN:
            self._bad.append(sentence)

    def _add(self, encoded: Encoded) -> None:
        if not encoded.tokens:
            return
        tokens = np.asarray(list(encoded.tokens), dtype=self.dtype).tobytes()
        self._digest.update(tokens)
        self._num_tokens += len(encoded.tokens)
        largest = max(encoded.tokens)
        self._max_token = max(self._max_token, largest)
        self._ends.append(self._num_tokens)
        learnt = b""
        if encoded.learnt is not None:
            learnt = np.asarray(encoded.learnt, dtype=np.uint8).tobytes()
            self._digest.update(learnt)
        with _storing():
            self._tokens.write(tokens)
            self._learnt.write(learnt)

    @property
    def all_ends(self) -> Numbers:
        """The place after each document's last token."""
        return np.frombuffer(self._ends, dtype=np.int64) if self._ends else np.empty(0, np.int64)

    @property
    def facts(self) -> DocumentFacts:
        """The numbers of the rows so far."""
        digest = self._digest.copy()
        digest.update(self.all_ends.tobytes())
        number = int.from_bytes(digest.digest(), "little") >> 2
        return DocumentFacts(
            self._max_token, number, self._num_bad, tuple(self._bad), self._kind or "text"
        )

    @property
    def about(self) -> JsonObject:
        """All that opening the files needs, as plain data."""
        return {
            "dtype": self.dtype.name,
            "num_tokens": self._num_tokens,
            "facts": asdict(self.facts),
        }


class _Counter:
    """A line on stderr now and then, once the work has taken a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown = time.monotonic()
        self._in_place = sys.stderr.isatty()
        self._is_open = False

    def show(self, num_documents: int, num_tokens: int) -> None:
        """Say how far it is, if nothing has been said for a while."""
        now = time.monotonic()
        if now - self._shown < QUIET_SECONDS:
            return
        self._shown = now
        self._is_open = True
        self._say(num_documents, num_tokens, "\r" if self._in_place else "\n")

    def end(self, num_documents: int, num_tokens: int) -> None:
        """Say how much it was, if anything was said before."""
        if self._is_open:
            self._say(num_documents, num_tokens, "\n")

    def _say(self, num_documents: int, num_tokens: int, end: str) -> None:
        print(
            f"tokenising {self._name}: {num_documents:,} documents, {num_tokens:,} tokens",
            file=sys.stderr,
            end=end,
            flush=True,
        )


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    """Failures of the cache's own files: a full disk, a folder that may not be written."""
    try:
        yield
    except OSError as failure:
        raise StoreFailed(failure) from failure


@contextlib.contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Only one process of this machine makes a set of tokens; others wait for it."""
    lock = kept.with_name(f"{kept.name}.lock")
    with _storing():
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    with file:
        with contextlib.suppress(OSError, ImportError):  # without locks they are made twice
            import fcntl  # Unix alone has it

            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _fingerprint(path: Path) -> bytes:
    """The name, size, time and first bytes of a file."""
    try:
        about = path.stat()
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as failure:
        raise DataError(
            f"the data file {str(path)!r} cannot be read: {failure.strerror}"
        ) from failure
    words = repr([str(path.resolve()), about.st_size, about.st_mtime_ns]).encode()
    return words + hashlib.blake2b(head).digest()


def _dtype_of(vocab_size: int) -> np.dtype[Any]:
    """The narrowest whole numbers that hold every token."""
    for name in ("uint8", "uint16"):
        if vocab_size <= np.iinfo(name).max + 1:
            return np.dtype(name)
    return np.dtype("uint32")
