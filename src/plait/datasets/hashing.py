"""Random numbers as a pure function of (seed, index), many at once.

A generator must be seeded for each sample and hands out one sample at a time. A hash of the index
gives a whole batch in a few tensor operations, in any order of asking.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def seed_of(*parts: object) -> int:
    """A seed of 31 bits from any printable parts.

    Not more, because torch's CPU generator only takes the low 32 bits of its seed, and numpy's no
    negative ones.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def shift_right(x: Tensor, bits: int) -> Tensor:
    """The logical shift of int64 [...], which torch only has as an arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 [...] (Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", figure 16).
    """
    x = x * GOLDEN
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def bits(indices: Tensor, num: int, *, seed: int) -> Tensor:
    """63 random bits [B, num] for each index [B]; row i depends on (seed, indices[i]) alone."""
    rows = mix(indices.long() + mix(torch.tensor(seed_of(seed))))
    return shift_right(mix(rows[:, None] + torch.arange(num)), 1)


def integers(indices: Tensor, num: int, *, below: int, seed: int) -> Tensor:
    """Integers [B, num] in 0 .. below-1."""
    return bits(indices, num, seed=seed) % below


def uniforms(indices: Tensor, num: int, *, seed: int) -> Tensor:
    """float64 [B, num] in (0, 1]."""
    return (shift_right(bits(indices, num, seed=seed), 10).double() + 1) / 2**53


def normals(indices: Tensor, num: int, *, seed: int) -> Tensor:
    """float32 [B, num], standard normal (Box and Muller 1958)."""
    radius, angle = uniforms(indices, 2 * num, seed=seed).chunk(2, dim=1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).float()
