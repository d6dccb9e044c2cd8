"""Rows of a set of the library `datasets`: a saved folder, a stream, or what a function gives.

All rows become tokens before the run, so a stream has places as a folder has. A set in a folder is
known by its files. A stream is known by the files and addresses that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from plait.datasets.keys import SectionKeys, key
from plait.datasets.named_files import named_by, source_of
from plait.datasets.rows import BATCH, LABELS, Row, chosen_column, of_value
from plait.errors import DataError, PlaitError, nearest
from plait.reference import load
from plait.values import JsonValue

T = TypeVar("T")


@dataclass(frozen=True)
class LibrarySet:
    """The rows of one split of a set.

    Attributes:
        name: the set, as messages call it.
        found: a `Dataset` or an `IterableDataset`.
        column: the column that is read.
        files: the local files that the rows come from.
        settings: all else that the rows follow from.
        most: rows that are read at most; None reads all.
    """

    name: str
    found: Any
    column: str
    files: Sequence[Path]
    settings: Mapping[str, object] = field(default_factory=dict)
    most: int | None = None

    def __iter__(self) -> Iterator[Row]:
        return islice(self._all(), self.most)

    def _all(self) -> Iterator[Row]:
        rows = self.found.with_format(None)
        batches = rows.iter(batch_size=min(BATCH, self.most or BATCH))
        number = 0
        while (batch := _said(self.name, lambda: next(batches, None), after=number)) is not None:
            values = batch[self.column]
            for value, labels in zip(values, batch.get(LABELS, repeat(None)), strict=False):
                number += 1
                yield of_value(f"{self.name}, row {number}", value, labels)


def library_set(data: SectionKeys) -> LibrarySet:
    """The set that a section of data `hf` names. Raises `DataError`."""
    library = _library()
    path = key(data, "path", "")
    split = key(data, "split")
    python = key(data, "python")
    if python is not None:
        name = f"python = {python!r}"
        samples = _split_of(_given(python, library), split, name)
        files, addresses = named_by(samples)
        files = sorted({*files, *source_of(load(python, DataError))})
        print_of_set = getattr(samples, "_fingerprint", None)  # of a set with an index
        about = {"python": python, "addresses": addresses, "fingerprint": print_of_set}
    elif key(data, "streaming", False):
        name = repr(path)
        subset = key(data, "subset")
        streams = _said(name, lambda: library.load_dataset(path, subset, streaming=True))
        samples = _split_of(streams, split, name)
        files, addresses = named_by(samples)
        about = {"streaming": path, "subset": subset, "addresses": addresses}
    else:
        folder = Path(path).expanduser()
        name = str(folder)
        samples = _split_of(_saved(folder, library), split, repr(name))
        files = [one for one in sorted(folder.rglob("*")) if one.is_file()]
        about = {}
    column = chosen_column(_columns_of(samples, name), key(data, "column"), name)
    most = key(data, "rows")
    return LibrarySet(name, samples, column, files, _settings(column, split, most, about), most)


def _settings(
    column: str, split: str | None, most: int | None, others: Mapping[str, object]
) -> Mapping[str, object]:
    """The settings of a key; those that are not used are left out, so that a key stays."""
    used = {name: value for name, value in {**others, "rows": most}.items() if value is not None}
    return {"column": column, "split": split, **used}


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise DataError(
            'data "hf" is read by the library datasets, which is not installed here: '
            'pip install "plait[data]"'
        ) from None
    return datasets


def _saved(folder: Path, library: ModuleType) -> Any:
    """The set of a folder of `save_to_disk`."""
    if not folder.is_dir():
        raise DataError(f"data 'hf': there is no folder {str(folder)!r}")
    try:
        return library.load_from_disk(str(folder))
    except Exception as failure:
        raise DataError(
            f"data 'hf': {str(folder)!r} is no folder of save_to_disk that can be read: "
            f"{_reason(failure)}; streaming = true reads a folder of data files"
        ) from failure


def _given(python: str, library: ModuleType) -> Any:
    """The set that a user's function returns."""
    name = f"python = {python!r}"
    found = _said(name, load(python, DataError))
    kinds = (library.Dataset, library.IterableDataset)
    sets = list(found.values()) if isinstance(found, dict) else [found]
    if not sets or not all(isinstance(one, kinds) for one in sets):
        raise DataError(
            f"{name} returned a {type(found).__name__}; data 'hf' takes a Dataset or an "
            "IterableDataset of the library datasets; leave name out for data of your own"
        )
    return found


def _split_of(found: Any, split: str | None, name: str) -> Any:
    """The set itself, or the split that is asked for, else `train`."""
    if not isinstance(found, dict):
        if split is not None:
            raise DataError(f"{name} has no splits; leave split = {split!r} out")
        return found
    wanted = split or "train"
    if wanted not in found:
        raise DataError(f"{name} has no split {wanted!r}; {nearest(wanted, list(found))}")
    return found[wanted]


def _columns_of(found: Any, name: str) -> list[str]:
    """The columns of a set; a stream that does not say them shows them in its first row."""
    if found.column_names is not None:
        return list(found.column_names)
    first = _said(name, lambda: next(iter(found.take(1)), None))
    if first is None:
        raise DataError(f"{name}: there is no document in it")
    return list(first)


def _said(name: str, act: Callable[[], T], after: int | None = None) -> T:
    """The result of code that is not ours. Its failure is one sentence."""
    try:
        return act()
    except PlaitError:
        raise
    except Exception as failure:
        where = "" if after is None else f" behind row {after}"
        raise DataError(f"data 'hf': {name} failed{where}: {_reason(failure)}") from failure


def _reason(failure: Exception) -> JsonValue:
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
