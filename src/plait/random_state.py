"""The random state of the process, which ranks share when they are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DRAWING = threading.RLock()


@contextmanager
def drawn_alone(seed: int) -> Iterator[None]:
    """Draw on the host from a seed, and leave its random state unchanged.

    Ranks that are threads share the process's generator, so they do this one after another. What is
    done here must not wait for another rank.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        # torch.manual_seed asks every kind of device; values are drawn on the host alone.
        torch.default_generator.manual_seed(seed)
        yield
