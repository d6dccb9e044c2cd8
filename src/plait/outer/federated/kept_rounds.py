"""The state that a client of a deployment keeps between rounds, in memory and on its disk.

A server that was interrupted repeats the round that it had not finished. So the state before that
round is kept too. A new federation begins without the state of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from plait.outer.federated.samples import ClientState, Samples

CONTROL = "control"
BEFORE = "before"


class KeptRounds:
    """The state of a client after the newest round that it took part in, and before it."""

    def __init__(self, samples: Samples, path: Path | None) -> None:
        """Read what an earlier process has left at `path`, if anything."""
        self._samples = samples
        self._path = path
        self._before = ClientState()
        self._federation = ""
        self._number = 0
        if path is not None and path.exists():
            self._read(path)

    @contextmanager
    def around(self, federation: str, number: int, *, keeps: bool) -> Iterator[None]:
        """Train the round `number` of a federation inside, from the state that it begins with.

        Afterwards SCAFFOLD's control is on disk, where this process is the one that `keeps` it.
        """
        if federation != self._federation:
            self._samples.kept = ClientState()
        elif number == self._number:
            self._samples.kept = self._before
        before = self._samples.kept
        yield
        self._federation, self._number, self._before = federation, number, before
        if keeps:
            self._write()

    def _write(self) -> None:
        control = self._samples.kept.control
        if self._path is None or control is None:
            return
        vectors = {CONTROL: control}
        if self._before.control is not None:
            vectors[BEFORE] = self._before.control
        new = self._path.with_suffix(".new")
        save_file(vectors, new, {"federation": self._federation, "round": str(self._number)})
        new.replace(self._path)

    def _read(self, path: Path) -> None:
        vectors = load_file(path)
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
        self._samples.kept = ClientState(vectors[CONTROL])
        self._before = ClientState(vectors.get(BEFORE))
        self._federation = told.get("federation", "")
        self._number = int(told.get("round", 0))
