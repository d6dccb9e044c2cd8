"""A function that no new process can import travels by value. Such a function was typed into an
interpreter or a notebook, or given by `python -c` or on stdin. One in a package's `__main__.py` is
another.

Pickle names a function's module, and such a `__main__` has no file to be imported from. cloudpickle
takes the code itself, and what it uses of its module. Results come back the same way.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from plait.errors import PlaitError


@dataclass(frozen=True)
class FunctionByValue:
    """A function and its arguments, as bytes."""

    call: bytes

    def __call__(self) -> bytes:
        """The function's result, as bytes."""
        main, args = cloudpickle.loads(self.call)
        return bytes(cloudpickle.dumps(main(*args)))


def lacks_file() -> bool:
    """Whether the main module of this process has no file that a new process could import."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is None or not Path(path).is_file()


def needs_main(sent: bytes) -> bool:
    """Whether a pickle may name something of a main module that new processes leave out.

    multiprocessing leaves out the `__main__.py` of a package or of a folder. A rank would find
    what has the same name in multiprocessing's own main module.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_left_out = spec is not None and spec.name.rpartition(".")[2] == "__main__"
    return is_left_out and b"__main__" in sent


def by_value(main: Callable[..., object], args: tuple[object, ...]) -> FunctionByValue:
    """Raises `PlaitError` for what cannot be taken along: open files, locks, generators."""
    try:
        return FunctionByValue(cloudpickle.dumps((main, args)))
    except Exception as error:  # each kind of object has its own
        raise PlaitError(
            f"'{getattr(main, '__qualname__', main)}' or something that it uses cannot be sent to "
            "a "
            f"new process ({error}); make that inside the function, or put the function into a file"
        ) from error


def unpickled(results: list[Any]) -> list[Any]:
    """The results of the ranks."""
    return [cloudpickle.loads(result) for result in results]


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """New processes import the main module's file first; `<stdin>` is none."""
    module = sys.modules["__main__"]
    path = module.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if path is not None:
            module.__file__ = path
