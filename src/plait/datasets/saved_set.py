"""Rows of a folder that the library `datasets` has saved (`save_to_disk`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.datasets.rows import BATCH, Row, chosen_column, of_value
from plait.errors import DataError, nearest


class SavedSet:
    """The rows of a saved set, or of one split of several.

    Attributes:
        files: the files of the folder.
    """

    def __init__(self, path: str, column: str | None = None, split: str | None = None) -> None:
        self.path = Path(path).expanduser()
        try:
            import datasets
        except ImportError:
            raise DataError(
                'data "hf" is read by the library datasets, which is not installed here: '
                'pip install "plait[data]"'
            ) from None
        if not self.path.is_dir():
            raise DataError(f"data 'hf': there is no folder {str(self.path)!r}")
        try:
            loaded = datasets.load_from_disk(str(self.path))
        except Exception as failure:
            reason = str(failure).partition("\n")[0]
            raise DataError(
                f"data 'hf': {str(self.path)!r} is no folder of save_to_disk that can be read: "
                f"{type(failure).__name__}: {reason}"
            ) from failure
        self._set = self._split_of(loaded, split)
        self.column = chosen_column(self._set.column_names, column, str(self.path))
        self._split = split
        self.files: Sequence[Path] = [
            path for path in sorted(self.path.rglob("*")) if path.is_file()
        ]

    def _split_of(self, found: Any, split: str | None) -> Any:
        """The set itself, or the split that is asked for, else `train`."""
        if not isinstance(found, dict):
            if split is not None:
                raise DataError(f"{str(self.path)!r} has no splits; leave split = {split!r} out")
            return found
        wanted = split or "train"
        if wanted not in found:
            raise DataError(
                f"{str(self.path)!r} has no split {wanted!r}; {nearest(wanted, list(found))}"
            )
        return found[wanted]

    @property
    def name(self) -> str:
        """The folder."""
        return repr(str(self.path))

    @property
    def settings(self) -> Mapping[str, object]:
        """The column and the split."""
        return {"column": self.column, "split": self._split}

    def __iter__(self) -> Iterator[Row]:
        rows = self._set.select_columns([self.column]).with_format(None)
        number = 0
        for batch in rows.iter(batch_size=BATCH):
            for value in batch[self.column]:
                number += 1
                yield of_value(f"{self.path}, row {number}", value)
