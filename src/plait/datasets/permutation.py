"""A random order of any number of samples, of which each place is computed by itself.

A Feistel network with hashed halves permutes the numbers of an even count of bits. Numbers beyond
the size walk on along their cycle until they are inside (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002, section 4).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from plait.datasets.hashing import mix, seed_of

ROUNDS: Final = 8


class KeyedPermutation:
    """A permutation of 0 .. size - 1 that follows from a seed. Nothing is stored."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._half = max(1, -(-(size - 1).bit_length() // 2))
        self._mask = (1 << self._half) - 1
        self._keys = [mix(torch.tensor(seed_of(seed, turn))) for turn in range(ROUNDS)]

    def __call__(self, places: Tensor) -> Tensor:
        """Places [B] in the order -> the samples that stand there [B]."""
        found = self._turned(places.long())
        outside = found >= self.size
        while outside.any():
            found[outside] = self._turned(found[outside])
            outside = found >= self.size
        return found

    def _turned(self, numbers: Tensor) -> Tensor:
        """One pass of the network over numbers of twice `_half` bits."""
        left = numbers >> self._half
        right = numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._mask)
        return (left << self._half) | right
