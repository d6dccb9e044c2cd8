"""Handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn, the extra `digits`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from plait.errors import DataError


class Digits(TensorDataset):
    """(pixels in 0 .. 1, as [1, 8, 8] or flat [64]; the digit)."""

    def __init__(self, *, flat: bool) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as missing:
            raise DataError(
                'data "digits" comes with scikit-learn, which is not installed here: '
                'pip install "plait[digits]"'
            ) from missing
        pixels, digits = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float() / 16
        super().__init__(
            images if flat else images.view(-1, 1, 8, 8), torch.from_numpy(digits).long()
        )

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (images [B, 1, 8, 8] or [B, 64], digits [B])."""
        images, digits = self.tensors
        return images[indices], digits[indices]
