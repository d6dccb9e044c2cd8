"""Random numbers of a run, from one seed, and which generators it has drawn from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.random_state import numpys_own, seed_numpy


@contextmanager
def random_from(seed: int, wanted: bool = True) -> Iterator[None]:
    """Random numbers start from `seed`; nothing changes outside."""
    pythons = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), numpys_own() if wanted else nullcontext():
            if wanted:
                torch.manual_seed(seed)
                random.seed(seed)
                seed_numpy(seed)
            yield
    finally:
        random.setstate(pythons)


@dataclass(frozen=True)
class Generators:
    """The states of the process's generators: torch's, Python's, and numpy's where it is loaded."""

    torchs: Tensor
    pythons: object
    numpys: tuple[object, ...]

    @classmethod
    def now(cls) -> Generators:
        """The states as they are."""
        return cls(torch.get_rng_state(), random.getstate(), _numpy_state())

    def moved(self) -> tuple[str, ...]:
        """The generators that have drawn since."""
        now = Generators.now()
        same = {
            "torch": torch.equal(self.torchs, now.torchs),
            "random": self.pythons == now.pythons,
            "numpy": self.numpys == now.numpys,
        }
        return tuple(name for name, is_same in same.items() if not is_same)


@contextmanager
def all_from(seed: int, only: str = "") -> Iterator[None]:
    """Random numbers of torch, Python and numpy start from `seed`; nothing changes outside.

    `only` is the one generator that starts from it, while the others start from 0.
    """
    torchs, pythons, numpys = (
        seed if only in ("", name) else 0 for name in ("torch", "random", "numpy")
    )
    with random_from(torchs):
        random.seed(pythons)
        seed_numpy(numpys)
        yield


def _numpy_state() -> tuple[object, ...]:
    """The state of numpy's generator, its array as bytes; empty where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    _, keys, *rest = numpy.random.get_state()
    return keys.tobytes(), *rest
