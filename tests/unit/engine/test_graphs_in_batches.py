"""A graph whose nodes are the samples of a batch is told where a plan divides it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine.batch import BatchSplitter
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


class Edges(nn.Module):
    """A convolution over the edges of a graph, as PyG gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        """[nodes, 5] and [2, edges] -> [nodes, 3]."""
        hidden = self.last(self.first(features).relu())
        made = torch.zeros_like(hidden)
        return made.index_add(0, edges[1], hidden[edges[0]])


class Sparse(Edges):
    """The same with a sparse adjacency."""

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        """[nodes, 5] and [nodes, nodes] -> [nodes, 3]."""
        return torch.sparse.mm(edges.transpose(0, 1), self.last(self.first(features).relu()))


def graph(kind: type[nn.Module]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A ring of eight nodes, and their targets [8, 3]."""
    draw = torch.Generator().manual_seed(1)
    edges = torch.stack([torch.arange(8), torch.arange(8).roll(1)])
    if kind is Sparse:
        edges = torch.sparse_coo_tensor(edges, torch.ones(8), (8, 8), check_invariants=True)
    return (torch.randn(8, 5, generator=draw), edges), torch.randn(8, 3, generator=draw)


def edge_losses(kind: type[nn.Module], plan: str, *, prepares: bool = True) -> list[float]:
    """The losses of three steps with one graph, on the first rank."""
    torch.manual_seed(2)
    start = kind()

    def run(world: World) -> list[float]:
        engine = plait.build(
            copy.deepcopy(start),
            plan,
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        batches = [graph(kind)] * 3
        return [
            engine.step(batch).loss for batch in (engine.prepare(batches) if prepares else batches)
        ]

    size = plait.Plan.parse(plan).world_size
    losses: list[float] = threaded(size, run, plan=plan)[0]
    return losses


def plain_losses(kind: type[nn.Module]) -> list[float]:
    """Those of a loop in plain PyTorch."""
    torch.manual_seed(2)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        (features, edges), targets = graph(kind)
        optimizer.zero_grad()
        loss = F.mse_loss(model(features, edges), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [Edges, Sparse])
@pytest.mark.parametrize("plan", ["dp1", "tp2"])
def test_a_graph_that_nothing_divides_trains_as_in_a_plain_loop(
    kind: type[nn.Module], plan: str
) -> None:
    assert edge_losses(kind, plan) == pytest.approx(plain_losses(kind), rel=1e-5)


def test_each_data_rank_may_have_a_graph_of_its_own() -> None:
    found = edge_losses(Edges, "dp2", prepares=False)
    assert found == pytest.approx(plain_losses(Edges), rel=1e-5)


@pytest.mark.parametrize("plan", ["mb2", "dp2", "tp4:2d", "dp2 tp2"])
def test_first_dims_that_differ_are_refused_where_they_are_divided(plan: str) -> None:
    with pytest.raises(DataError, match=r"agree in their first dim.*\[2, 8\].*dp1 or tpN:1d"):
        edge_losses(Edges, plan)


def test_a_mapping_counts_its_labels() -> None:
    splitter = BatchSplitter(Edges(), 1, torch.float32, torch.device("cpu"), divides=False)
    (features, edges), targets = graph(Edges)
    (micro,) = splitter.split({"edges": edges, "features": features, "y": targets})
    assert micro.num_samples == 8
    assert micro.tokens_per_sample == 1
    assert micro.inputs["edges"].shape == (2, 8)


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

    match = r"inputs are \[1, 6\], which ends in 'mat1 .*=Cutting\(example=\.\.\.\)"
    with pytest.raises(ModelError, match=match):
        threaded(2, run, plan="pp2")
