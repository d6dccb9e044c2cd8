"""torch without its compiler, until a graph is compiled. To be imported before torch.

Hundreds of torch's functions are marked as not to be traced. The mark loads the compiler when such
a function is first called, which takes a second of the processor. So does every process that makes
an optimizer, or a model on the meta device. Where the compiler is not loaded nothing is traced, so
the plain function does the same. As soon as the compiler is loaded, torch is as it came.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from plait.imports import when_loaded

_MARKER = "torch._compile"
_COMPILER = "torch._dynamo"
_UNTRACED = "__dynamo_disable"  # where torch keeps the form of a function that is not traced


def spare_compiler() -> None:
    """Have functions run as they are until the compiler is loaded. Too late once torch is."""
    if "torch" not in sys.modules:
        when_loaded(_MARKER, _mark_later)


def _mark_later() -> None:
    module: Any = sys.modules[_MARKER]
    mark = getattr(module, "_disable_dynamo", None)
    if mark is None:  # torch has changed
        return
    plain: list[Any] = []

    def marked(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(marked, recursive=recursive)
        found = mark(fn, recursive)
        try:
            setattr(fn, _UNTRACED, fn)
        except AttributeError:
            return found
        plain.append(fn)
        return found

    def restore() -> None:
        module._disable_dynamo = mark
        sys.modules["torch"]._disable_dynamo = mark  # type: ignore[attr-defined]
        for fn in plain:
            if getattr(fn, _UNTRACED, None) is fn:
                delattr(fn, _UNTRACED)
        plain.clear()

    module._disable_dynamo = marked
    when_loaded(_COMPILER, restore)


spare_compiler()
