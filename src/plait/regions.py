"""Regions of a forward that its own code recomputes in the backward.

`torch.utils.checkpoint` makes them. A pipeline may cut inside such a region. Its backward would
then run modules of other stages again. So a region around units is none here, and each unit in it
recomputes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils.checkpoint import checkpoint

from plait.torch_internals import on_checkpoint
from plait.values import PyTree


class _Depth(threading.local):
    """How many regions the forward of this thread is in; None where regions are torch's."""

    regions: int | None = None


_depth = _Depth()


@contextmanager
def dissolved() -> Iterator[None]:
    """Let calls of `torch.utils.checkpoint` run their function alone, in this thread."""
    on_checkpoint(_is_open, _entered)
    before, _depth.regions = _depth.regions, 0
    try:
        yield
    finally:
        _depth.regions = before


@contextmanager
def untouched() -> Iterator[None]:
    """Let calls inside a unit mean what torch means by them."""
    before, _depth.regions = _depth.regions, None
    try:
        yield
    finally:
        _depth.regions = before


def run_unit(forward: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    """Run a unit, which recomputes where the code around it asked for that."""
    recomputes = bool(_depth.regions)
    with untouched():
        if recomputes:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)


def _is_open() -> bool:
    return _depth.regions is not None


@contextmanager
def _entered() -> Iterator[None]:
    assert _depth.regions is not None  # asked by `_is_open`
    _depth.regions += 1
    try:
        yield
    finally:
        _depth.regions -= 1
