"""Random numbers of one slice of a batch: torch's and Python's, from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_from(seed: int, wanted: bool = True) -> Iterator[None]:
    """Random numbers start from `seed`; nothing changes outside."""
    pythons = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            if wanted:
                torch.manual_seed(seed)
                random.seed(seed)
            yield
    finally:
        random.setstate(pythons)
