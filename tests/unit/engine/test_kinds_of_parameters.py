"""Parameters that no plan can lay out are refused before anything is built, by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import ModelError


def with_parameter(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_parameter("own", nn.Parameter(value, requires_grad=value.is_complex()))
    return model


def quantised() -> nn.Module:
    """A frozen base as torchao keeps it, beside a layer that is trained."""
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return nn.Sequential(model, nn.Linear(16, 4))


@pytest.mark.filterwarnings("ignore")
def test_a_base_that_another_package_has_quantised_is_refused() -> None:
    model = quantised()
    with pytest.raises(ModelError, match=r"'0\.0\.weight' and 1 more of .* is a Int8Tensor"):
        plait.build(model, "dp1", loss=F.mse_loss, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            with_parameter(torch.arange(4)),
            "'own' of Linear is of int64, .* as a buffer",
        ),
        (with_parameter(torch.ones(4) > 0), "'own' of Linear is of bool, .* as a buffer"),
        (with_parameter(torch.ones(4, dtype=torch.cfloat)), "'own' of Linear is complex"),
        (nn.Sequential(nn.LazyLinear(4)), r"'0\.weight' and 1 more of Sequential has no shape"),
        (nn.Sequential(nn.Embedding(4, 4, sparse=True)), "'0' of Sequential has sparse=True"),
        (nn.EmbeddingBag(4, 4, mode="sum", sparse=True), "sparse=True"),
    ],
)
def test_parameters_that_no_plan_lays_out(model: nn.Module, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        plait.build(
            model,
            "dp1",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
