"""Random numbers of a run: seeds from words, and the state of a step, apart from the user's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.random_state import numpys_own, set_state_of_host, state_of_host


def derive_seed(*words: object) -> int:
    """A seed of 63 bits that depends on every word."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Leave the user's random state unchanged, Python's and numpy's too. A step has its own, so
    that dropout is the same under every plan.
    """
    pythons = random.getstate()
    users = state_of_host()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with numpys_own():
            yield
    finally:
        set_state_of_host(users)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        random.setstate(pythons)
