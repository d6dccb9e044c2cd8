"""The Fourier neural operator: its convolution is one over the whole periodic field, at any
resolution, and it learns.
"""

from __future__ import annotations

import pytest
import torch

from plait import datasets, models
from plait.errors import ModelError
from plait.models.fno import SpectralConvolution
from plait.models.losses import mse

KEYS = {"name": "fno", "hidden_size": 6, "num_hidden_layers": 2, "modes": 3}


def test_the_convolution_is_one_with_a_kernel_as_wide_as_the_field() -> None:
    """Against its definition: the sum over all points of kernel(x - y) v(y), the kernel made from
    the weight mode by mode.
    """
    torch.manual_seed(0)
    n = 8
    modes = 2
    width = 3
    layer = SpectralConvolution(width, modes).double()
    weight = torch.view_as_complex(layer.weight)
    x = torch.randn(1, n, n, width, dtype=torch.float64)
    points = torch.arange(n, dtype=torch.float64)
    kernel = torch.zeros(n, n, width, width, dtype=torch.float64)
    for row, k in enumerate([*range(modes), *range(-modes, 0)]):
        for m in range(modes):
            wave = torch.exp(2j * torch.pi * (k * points[:, None] + m * points[None, :]) / n)
            one = (wave[:, :, None, None] * weight[row, m]).real
            kernel += (
                one if m == 0 else 2 * one
            )  # a real field has every mode but those with m = 0 twice
    expected = torch.zeros_like(x)
    for i in range(n):
        for j in range(n):
            expected += torch.einsum("hwio,i->hwo", kernel.roll((i, j), (0, 1)), x[0, i, j]) / n**2
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_one_model_takes_fields_of_any_resolution() -> None:
    """A smooth field sampled twice as finely gives the same values at the points of both."""
    torch.manual_seed(0)
    model = models.make(**KEYS).double()
    points = torch.arange(32, dtype=torch.float64) / 32
    fine = torch.sin(2 * torch.pi * points)[:, None] * torch.cos(4 * torch.pi * points)[None, :]
    lifted = model.lift(fine[None, None])
    layer = model.blocks[0].convolution
    torch.testing.assert_close(
        layer(lifted)[:, ::2, ::2] * 1.0, layer(lifted[:, ::2, ::2]), rtol=1e-10, atol=1e-10
    )
    assert model(fine[None, None]).shape == (1, 1, 32, 32)


def test_too_many_modes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"modes = 3 is too many for a field of 4 x 8 points"):
        models.make(**KEYS)(torch.zeros(1, 1, 4, 8))


def test_it_learns_the_heat_equation() -> None:
    torch.manual_seed(0)
    model = models.make(**{**KEYS, "hidden_size": 12})
    data = datasets.make({"name": "random", "image_size": 12}, KEYS)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        before, after = data.batch(torch.arange(8) + 8 * step)
        total, count = mse(model(before), after)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / count))
    assert losses[-1] < losses[0] / 10
