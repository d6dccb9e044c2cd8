"""Tensors in the memory of a trained parameter are refused or told before anything is built."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.errors import ModelError


def built(model: nn.Module) -> None:
    plait.build(
        model,
        "dp1",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


class Autoencoder(nn.Module):
    """Encoder and decoder, to be tied in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4, bias=False)
        self.decoder = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def test_a_transposed_weight_in_one_memory() -> None:
    model = Autoencoder()
    model.decoder.weight = nn.Parameter(model.encoder.weight.data.t())
    with pytest.raises(ModelError, match=r"'encoder\.weight' and 'decoder\.weight' of Autoencoder"):
        built(model)


def test_a_part_of_a_weight() -> None:
    model = Autoencoder()
    model.register_parameter("own", nn.Parameter(model.encoder.weight.data[1:, 2:4]))
    with pytest.raises(ModelError, match=r"'own' and 'encoder\.weight'"):
        built(model)


def test_a_frozen_copy_in_the_memory_of_a_trained_one() -> None:
    model = Autoencoder()
    model.register_parameter("target", nn.Parameter(model.encoder.weight.data, requires_grad=False))
    with pytest.raises(ModelError, match="'target'"):
        built(model)


def test_a_buffer() -> None:
    model = Autoencoder()
    model.register_buffer("shadow", model.encoder.weight.detach())
    with pytest.raises(ModelError, match=r"buffer 'shadow' .* 'encoder\.weight'.*clone"):
        built(model)


@pytest.mark.parametrize(
    "holds", [lambda view: view, lambda view: [view], lambda view: {"a": view}]
)
def test_an_attribute(holds: object) -> None:
    model = Autoencoder()
    view = model.encoder.weight.detach()[:2]
    model.encoder.top = holds(view)  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"'encoder\.top' .* view of .*'encoder\.weight'"):
        built(model)


def test_what_is_right_passes() -> None:
    model = Autoencoder()
    flat = torch.randn(64)
    model.encoder.weight = nn.Parameter(flat[:32].view(4, 8))
    model.decoder.weight = nn.Parameter(flat[32:].view(8, 4))
    mixed = torch.randn(4, 8)
    model.register_parameter("left", nn.Parameter(mixed[:, :4]))
    model.register_parameter("right", nn.Parameter(mixed[:, 4:]))
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    model.register_parameter("frozen", frozen)
    model.register_buffer("same", frozen.data)
    model.weights = [model.encoder.weight]
    model.tied = model.encoder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(model)


def test_spectral_norm_keeps_an_attribute_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(torch.nn.utils.spectral_norm(nn.Linear(4, 4)))
