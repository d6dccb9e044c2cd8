"""Random data for any model family: what to measure and to verify with, when no meaning is needed.

Sample i is a function of (seed, i) alone, so every rank, plan and order of asking sees the same one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.datasets.hashing import integers, normals

NUM_SAMPLES = 2**16


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """(input_ids [S], labels [S]), the labels one token ahead."""

    def __init__(self, seq_len: int, vocab_size: int, *, seed: int = 0, num_samples: int = NUM_SAMPLES) -> None:
        self.seq_len, self.vocab_size, self.seed, self.num_samples = seq_len, vocab_size, seed, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.batch(torch.tensor([index]))
        return inputs[0], labels[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (input_ids [B, S], labels [B, S])."""
        tokens = integers(indices, self.seq_len + 1, below=self.vocab_size, seed=self.seed)
        return tokens[:, :-1], tokens[:, 1:]


class RandomClasses(Dataset[tuple[Tensor, Tensor]]):
    """(features of `shape`, standard normal; a class number)."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, *, seed: int = 0, num_samples: int = NUM_SAMPLES) -> None:
        self.shape, self.num_classes, self.seed, self.num_samples = shape, num_classes, seed, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, classes = self.batch(torch.tensor([index]))
        return features[0], classes[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (features [B, *shape], classes [B])."""
        features = normals(indices, math.prod(self.shape), seed=self.seed).view(-1, *self.shape)
        return features, integers(indices, 1, below=self.num_classes, seed=self.seed + 1)[:, 0]
