"""A graph whose nodes are the samples of a batch is told where a plan divides it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine.explain import explained, graph_of_an_example_error
from plait.errors import DataError, ModelError
from tests.helpers.threaded import threaded


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        made: Tensor = adjacency @ self.layer(features)
        return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.layer(features)
        scores = (hidden @ hidden.T).where(adjacency > 0, torch.tensor(-1e9))
        return scores.softmax(1) @ hidden


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        made: Tensor = self.layer(adjacency)
        return made


def train(model: nn.Module, plan: str) -> None:
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=torch.optim.SGD)
    engine.step(((torch.randn(8, 5), torch.eye(8)), torch.randn(8, 3)))
    engine.world.close()


@pytest.mark.parametrize("model", [Convolution, Attention])
def test_a_graph_whose_nodes_are_divided_is_told(model: type[nn.Module]) -> None:
    train(model(), "dp1")
    with pytest.raises(DataError, match=r"2 parts .* has 4 rows .* \[8, 8\].*tpN:1d.*dp1"):
        train(model(), "mb2")


def test_another_error_of_shapes_stays_torchs_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(Wrong(), "mb2")


@pytest.mark.parametrize("model", [Convolution, Attention])
def test_one_node_as_an_example_is_told(model: type[nn.Module]) -> None:
    example = (torch.randn(1, 5), torch.ones(1, 8))
    with (
        pytest.raises(ModelError, match=r"refuses one sample, whose input is \[1, 8\].*mb1"),
        explained(graph_of_an_example_error(example)),
    ):
        model()(*example)


def test_an_example_that_does_not_fit_the_model_is_told() -> None:
    def run(world: World) -> None:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 4)), nn.Linear(4, 3))
        options = plait.Options(cutting=plait.Cutting(measure=True))
        engine = plait.build(
            model, "pp2", loss=F.mse_loss, optimizer=torch.optim.SGD, options=options, world=world
        )
        engine.prepare([(torch.randn(8, 6), torch.randn(8, 3))])

    match = r"inputs are \[1, 6\], and torch says 'mat1 .*=Cutting\(example=\.\.\.\)"
    with pytest.raises(ModelError, match=match):
        threaded(2, run, plan="pp2")
