"""Forwards that backward repeats: the second run begins with the state that the first one met.

Afterwards the state is as it was before the second run, which counts, keeps and draws for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

Context = AbstractContextManager[object]


class Remembered(Protocol):
    """A part of the state that a forward may change, as it was at one moment."""

    def now(self) -> Remembered:
        """The part as it is by now."""

    def put_back(self) -> None:
        """Let the part be as it was."""


class FirstForward:
    """Around the first run of a forward, within `inner`: remembers what it begins with.

    Each of `parts` is a context around the run that gives a part of the state as it was before.
    """

    def __init__(self, inner: Context, parts: Sequence[AbstractContextManager[Remembered]]) -> None:
        self._inner = inner
        self._parts = parts
        self._open = ExitStack()
        self.before: list[Remembered] = []

    def __enter__(self) -> None:
        with ExitStack() as opened:
            self.before = [opened.enter_context(part) for part in self._parts]
            opened.enter_context(self._inner)
            self._open = opened.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


class RepeatedForward:
    """Around the same forward run again, within `inner`.

    A forward that takes a gradient of its blocks enters it more than once.
    """

    def __init__(self, inner: Context, first: FirstForward) -> None:
        self._inner = inner
        self._first = first
        self._now: list[Remembered] = []

    def __enter__(self) -> None:
        self._now = [part.now() for part in self._first.before]
        for part in self._first.before:
            part.put_back()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            now, self._now = self._now, []
            for part in now:
                part.put_back()
