"""Regions of a forward that its own code recomputes in the backward.

`torch.utils.checkpoint` makes them. A pipeline may cut inside such a region. Its backward would
then run modules of other stages again. So a region around units is none here, and each unit in it
recomputes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.utils.checkpoint import checkpoint

from plait.torch_internals import on_checkpoint
from plait.values import PyTree


class _Depth(threading.local):
    """How many regions the forward of this thread is in; None where regions are torch's."""

    regions: int | None = None

    @contextmanager
    def at(self, regions: int | None) -> Iterator[None]:
        """Be in so many regions for a while."""
        before, self.regions = self.regions, regions
        try:
            yield
        finally:
            self.regions = before


_depth = _Depth()


@contextmanager
def dissolved() -> Iterator[None]:
    """Let calls of `torch.utils.checkpoint` run their function alone, in this thread."""
    on_checkpoint(_is_open, _entered)
    with _depth.at(0):
        yield


def untouched() -> AbstractContextManager[None]:
    """Let calls inside a unit mean what torch means by them."""
    return _depth.at(None)


def run_unit(forward: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    """Run a unit, which recomputes where the code around it asked for that."""
    recomputes = bool(_depth.regions)
    with untouched():
        if recomputes:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)


def _is_open() -> bool:
    return _depth.regions is not None


def _entered() -> AbstractContextManager[None]:
    return _depth.at((_depth.regions or 0) + 1)
