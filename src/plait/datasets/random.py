"""Random data for any model family: what to measure and to verify with, when no meaning is needed.

Sample i is a function of (seed, i) alone. So every rank, plan and order of asking sees the same
one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.datasets.hashing import integers, normals

NUM_SAMPLES = 2**16


class Seeded(Dataset[tuple[Tensor, Tensor]]):
    """So many pairs (input, target), as `batch` makes them from a seed."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self.seed = seed
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (inputs [B, ...], targets [B, ...])."""
        raise NotImplementedError


class RandomTokens(Seeded):
    """(input_ids [S], labels [S]), the labels one token ahead."""

    def __init__(
        self, seq_len: int, vocab_size: int, *, seed: int = 0, num_samples: int = NUM_SAMPLES
    ) -> None:
        super().__init__(seed, num_samples)
        self.seq_len = seq_len
        self.vocab_size = vocab_size

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S])."""
        tokens = integers(indices, self.seq_len + 1, below=self.vocab_size, seed=self.seed)
        return tokens[:, :-1], tokens[:, 1:]


class RandomClasses(Seeded):
    """(features of `shape`, standard normal; a class number)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        *,
        seed: int = 0,
        num_samples: int = NUM_SAMPLES,
    ) -> None:
        super().__init__(seed, num_samples)
        self.shape = shape
        self.num_classes = num_classes

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (features [B, *shape], classes [B])."""
        features = normals(indices, math.prod(self.shape), seed=self.seed).view(-1, *self.shape)
        return features, integers(indices, 1, below=self.num_classes, seed=self.seed + 1)[:, 0]


class RandomFields(Seeded):
    """(a smooth periodic field [in, N, N]; what the heat equation makes of it [out, N, N]).

    Channel o of the second is channel o mod in of the first, a unit of time later. Every mode k of
    the unit square decays by exp(-(2 pi k)^2 D) with D = 0.002.
    """

    DIFFUSION = 0.002
    SMOOTH = 0.1

    def __init__(
        self, channels: tuple[int, int], side: int, *, seed: int = 0, num_samples: int = NUM_SAMPLES
    ) -> None:
        super().__init__(seed, num_samples)
        self.channels = channels
        self.side = side
        waves = torch.fft.fftfreq(side, 1 / side, dtype=torch.float64)
        self._squares = waves[:, None] ** 2 + waves[None, :] ** 2

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (fields [B, in, N, N], fields [B, out, N, N])."""
        num_in, num_out = self.channels
        noise = normals(indices, num_in * self.side**2, seed=self.seed).view(
            -1, num_in, self.side, self.side
        )
        modes = torch.fft.fft2(noise.double()) * torch.exp(-self.SMOOTH * self._squares)
        later = modes * torch.exp(-((2 * math.pi) ** 2) * self.DIFFUSION * self._squares)
        before, after = (torch.fft.ifft2(one).real.to(noise.dtype) for one in (modes, later))
        return before, after[:, torch.arange(num_out) % num_in].contiguous()
