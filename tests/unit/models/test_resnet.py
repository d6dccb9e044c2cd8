"""ResNet has the published sizes, and treats each sample alone."""

from __future__ import annotations

import pytest
import torch

from plait import models


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("depth", "num_parameters"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)],
)
def test_published_parameter_counts(depth: int, num_parameters: int, norm: str) -> None:
    with torch.device("meta"):
        model = models.make("resnet", depth=depth, norm=norm)
    assert sum(param.numel() for param in model.parameters()) == num_parameters


@pytest.mark.parametrize("depth", [18, 50])
def test_a_sample_does_not_depend_on_its_neighbours(depth: int) -> None:
    torch.manual_seed(0)
    model = models.make("resnet", depth=depth, num_classes=10, in_channels=1, width=8)
    images = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(
        torch.cat([model(images[:1]), model(images[1:])]), model(images), rtol=1e-4, atol=1e-5
    )
    assert model(images).std(dim=0).min() > 1e-3, "the norm must not erase what tells samples apart"


@pytest.mark.parametrize("width", [8, 16, 24, 40, 56, 64])
def test_any_width_has_groups(width: int) -> None:
    with torch.device("meta"):
        assert models.make("resnet", width=width)(torch.empty(2, 3, 32, 32)).shape == (2, 1000)
