"""Rows of files in order: lines of text, JSON lines, and columns of Parquet and Arrow.

A row is a text, a list of tokens or a conversation. A row that cannot be read comes with its fault,
so that its reader may count it and go on. A file that cannot be read at all is an error.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from plait.datasets.documents import IGNORE, LABELLED
from plait.errors import DataError, nearest, some_of
from plait.values import JsonValue

COLUMNS: Final = ("text", "messages", "input_ids")
"""Columns that are looked for where none is named, in this order."""
TEXTS: Final = (".txt", ".text", ".md")
LINES: Final = (".jsonl", ".ndjson")
ARROW: Final = (".arrow", ".feather", ".ipc")
PARQUET: Final = (".parquet",)
SUFFIXES: Final = (*TEXTS, *LINES, *PARQUET, *ARROW)
LABELS: Final = "labels"
"""The column beside tokens that masks some of them by `IGNORE`."""
BATCH: Final = 1024
MOST_TOKENS: Final = 1 << 31


@dataclass(frozen=True)
class Row:
    """One row: the place that a message names, and its value, or the fault that hides it.

    Attributes:
        learnt: for each token whether it is learnt; None where the row has no labels.
    """

    place: str
    value: JsonValue = None
    fault: str = ""
    learnt: Sequence[bool] | None = None

    @property
    def kind(self) -> str:
        """The kind of the value: `text`, `tokens`, `labelled tokens`, or `chat`."""
        if self.learnt is not None:
            return LABELLED
        if isinstance(self.value, str):
            return "text"
        return "tokens" if isinstance(self.value[0], int) else "chat"


class RowSource(Protocol):
    """Rows in an order that does not change, and all that they follow from."""

    @property
    def name(self) -> str:
        """The source as messages call it."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold the rows."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The choices by which the files become rows."""

    def __iter__(self) -> Iterator[Row]: ...


def matching(patterns: Iterable[str]) -> list[Path]:
    """The files that paths and globs name: each once, a glob's by name. Raises `DataError`."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        wanted = str(Path(pattern).expanduser())
        names = sorted(glob.glob(wanted, recursive=True))  # noqa: PTH207 - any folder
        paths = [Path(name) for name in names if Path(name).is_file()]
        if not paths:
            raise DataError(f"files: no file matches {str(pattern)!r}")
        files.update(dict.fromkeys(paths))
    return list(files)


@dataclass(frozen=True)
class FileRows:
    """The rows of files, one file after the other.

    Attributes:
        files: text, JSON lines, Parquet or Arrow; text and JSON lines may be compressed by gzip.
        column: the column that is read; None takes the first of `COLUMNS` that is there.
        document: `line` or `file`, the document of a text file.
    """

    files: Sequence[Path]
    column: str | None = None
    document: str = "line"
    _readers: Mapping[str, Callable[[Path], Iterator[Row]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        readers = {
            **dict.fromkeys(TEXTS, self._texts),
            **dict.fromkeys(LINES, self._json_lines),
            **dict.fromkeys(PARQUET, self._parquet),
            **dict.fromkeys(ARROW, self._arrow),
        }
        object.__setattr__(self, "_readers", readers)
        for file in self.files:
            if _suffix(file) not in readers:
                raise DataError(
                    f"{str(file)!r}: files end in {', '.join(SUFFIXES)}, not in {file.suffix!r}"
                )

    @property
    def name(self) -> str:
        """The path of the first file, and the number of those that follow."""
        return some_of((repr(str(file)) for file in self.files), 1)

    @property
    def settings(self) -> Mapping[str, object]:
        """The choices by which the files become rows."""
        return {"column": self.column, "document": self.document}

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            try:
                yield from self._readers[_suffix(file)](file)
            except (OSError, EOFError) as failure:
                reason = getattr(failure, "strerror", None) or str(failure)
                raise DataError(f"the data file {str(file)!r} cannot be read: {reason}") from None

    def _texts(self, path: Path) -> Iterator[Row]:
        """The lines of a text, or the whole of it."""
        if self.document == "file":
            with _opened(path) as file:
                yield _decoded(str(path), file.read())
            return
        for place, line in _lines(path):
            yield _decoded(place, line)

    def _json_lines(self, path: Path) -> Iterator[Row]:
        """A column of JSON objects, one a line."""
        column = self.column
        for place, line in _lines(path):
            text = _decoded(place, line)
            if text.fault:
                yield text
                continue
            try:
                table = json.loads(text.value)
            except (ValueError, RecursionError) as failure:
                yield Row(place, fault=f"this is no JSON: {failure}")
                continue
            if not isinstance(table, dict):
                yield Row(place, fault=f"a {type(table).__name__} instead of a JSON object")
                continue
            column = column or chosen_column(list(table), None, place)
            if column not in table:
                yield Row(place, fault=f"there is no column {column!r}; {_near(column, table)}")
                continue
            yield of_value(place, table[column], table.get(LABELS))

    def _parquet(self, path: Path) -> Iterator[Row]:
        arrow = _pyarrow(path)
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                column = chosen_column(names, self.column, str(path))
                wanted = [name for name in names if name in (column, LABELS)]
                batches = file.iter_batches(batch_size=BATCH, columns=wanted)
                yield from _columns(path, batches, column)
        except (arrow.lib.ArrowException, OSError) as failure:
            raise _unreadable(path, "Parquet", failure) from None

    def _arrow(self, path: Path) -> Iterator[Row]:
        arrow = _pyarrow(path)
        from pyarrow import ipc

        try:
            with arrow.memory_map(str(path)) as source:
                try:
                    file = ipc.open_file(source)
                    batches = map(file.get_batch, range(file.num_record_batches))
                except arrow.lib.ArrowInvalid:
                    source.seek(0)
                    file = ipc.open_stream(source)
                    batches = iter(file)
                column = chosen_column(file.schema.names, self.column, str(path))
                yield from _columns(path, batches, column)
        except (arrow.lib.ArrowException, OSError) as failure:
            raise _unreadable(path, "Arrow", failure) from None


def chosen_column(names: Sequence[str], column: str | None, place: str) -> str:
    """The column that is asked for, else the first usual one. Raises `DataError`."""
    if column is None:
        for usual in COLUMNS:
            if usual in names:
                return usual
        raise DataError(
            f"{place}: there is no column {', '.join(COLUMNS)}; name one by column: "
            f"{', '.join(map(str, names)) or 'it has none'}"
        )
    if column not in names:
        raise DataError(f"{place}: there is no column {column!r}; {_near(column, names)}")
    return column


def of_value(place: str, value: object, labels: object = None) -> Row:
    """A row of a value, which is a text, tokens or a conversation; else with its fault.

    `labels`: a list beside tokens, of the same tokens or `IGNORE`; anything else is not used.
    """
    if isinstance(value, str):
        return Row(place, value)
    if isinstance(value, list) and value:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            wrong = next((one for one in value if not 0 <= one < MOST_TOKENS), None)
            if wrong is not None:
                return Row(place, fault=f"the token {wrong} is not in 0 .. {MOST_TOKENS - 1}")
            return (
                _labelled(place, value, labels) if isinstance(labels, list) else Row(place, value)
            )
        if all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value):
            return Row(place, value)
    if isinstance(value, list) and not value:
        return Row(place, "")
    kind = "nothing" if value is None else f"a value of type {type(value).__name__}"
    return Row(
        place,
        fault=f"{kind} is neither a text nor a list of tokens nor messages with role and content",
    )


def _labelled(place: str, tokens: list[int], labels: list[object]) -> Row:
    """A row of tokens and their labels, which are not yet moved by one place."""
    if len(labels) != len(tokens):
        return Row(place, fault=f"{len(labels)} labels stand beside {len(tokens)} tokens")
    for index, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (token, IGNORE):
            return Row(
                place,
                fault=f"the label {label} at {index} is neither {IGNORE} nor the token {token} "
                "there; labels are not moved, and the next token is learnt",
            )
    return Row(place, tokens, learnt=[label != IGNORE for label in labels])


def _columns(path: Path, batches: Iterable[Any], column: str) -> Iterator[Row]:
    """The values of a column, batch after batch."""
    number = 0
    for batch in batches:
        values = batch.column(column)
        has_labels = LABELS in batch.schema.names and column != LABELS
        for value, label in zip(
            values, batch.column(LABELS) if has_labels else values, strict=True
        ):
            number += 1
            place = f"{path}, row {number}"
            try:
                yield of_value(place, value.as_py(), label.as_py() if has_labels else None)
            except UnicodeDecodeError as failure:
                yield Row(place, fault=_no_text(failure))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that are not blank, with their places."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, row {number}", line.rstrip(b"\r\n")


def _decoded(place: str, content: bytes) -> Row:
    try:
        return Row(place, content.decode("utf-8-sig" if place.endswith(", row 1") else "utf-8"))
    except UnicodeDecodeError as failure:
        return Row(place, fault=_no_text(failure))


def _no_text(failure: UnicodeDecodeError) -> str:
    byte = failure.object[failure.start]
    return f"byte 0x{byte:02x} at {failure.start} is not UTF-8"


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _suffix(path: Path) -> str:
    """The ending that tells the format, in front of `.gz` where it may be compressed."""
    if path.suffix.lower() != ".gz":
        return path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if inner in (*TEXTS, *LINES) else ".gz"


def _near(column: str, names: Iterable[str]) -> str:
    known = [str(name) for name in names]
    return nearest(column, known) if known else "it has none"


def _unreadable(path: Path, kind: str, failure: Exception) -> DataError:
    reason = str(failure).partition("\n")[0]
    return DataError(f"the data file {str(path)!r} cannot be read as {kind}: {reason}")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{str(path)!r} is read by pyarrow, which is not installed here: "
            'pip install "plait[data]"'
        ) from None
    return pyarrow
