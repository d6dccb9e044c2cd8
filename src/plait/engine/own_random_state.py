"""Random numbers of a step, apart from the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Leave the user's random state unchanged. A step has its own, so that dropout is the same
    under every plan.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
