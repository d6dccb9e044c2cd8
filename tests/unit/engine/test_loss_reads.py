"""A loss that reads more than outputs and targets is as on one device, or refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import plait
from plait.comm import World
from plait.engine.loss_reads import LossReads, is_of_a_library, original_parameters
from plait.errors import ModelError
from plait.models.losses import cross_entropy
from tests.helpers.sgd import drawn_batch, sgd_engine, three_losses
from tests.helpers.threaded import threaded


class FeedForward(nn.Module):
    hidden: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(x).relu()
        return x + self.down(self.hidden)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(4))
        self.head = nn.Linear(6, 6)
        self.named = dict(self.named_parameters())

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Penalised(Stack):
    """The cure: the penalty of weights and of activations is part of the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks: Any = self.blocks
        output = super().forward(x)
        weights = torch.stack([param.abs().sum() for param in self.parameters()]).sum()
        hidden = torch.stack([block.hidden.abs().mean() for block in blocks]).sum()
        return output, weights / 100 + hidden


READERS: dict[str, Callable[[Any], Tensor]] = {
    "all": lambda model: torch.stack([p.abs().sum() for p in model.parameters()]).sum(),
    "one": lambda model: model.blocks[0].up.weight.square().sum(),
    "kept": lambda model: model.named["blocks.0.up.weight"].square().sum(),
    "hidden": lambda model: model.blocks[0].hidden.abs().mean(),
    "last": lambda model: model.head.weight.square().sum(),
    "described": lambda model: torch.tensor(float(sum(p.numel() for p in model.parameters()))),
}


def after_an_evaluation(world: World, models: list[Any]) -> None:
    """A step after an evaluation, whose loss does not read the activations."""
    model = models[world.rank]

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (READERS["hidden"](model) if model.training else 0)

    engine = plait.build(model, "tp2", loss=loss, optimizer=torch.optim.SGD, world=world)
    batch = (torch.linspace(-1, 1, 24).reshape(4, 6), torch.ones(4, 6))
    engine.evaluate(batch)
    engine.step(batch)


def test_activations_are_compared_in_training_after_an_evaluation() -> None:
    model = Stack()
    models = [model, Stack()]
    models[1].load_state_dict(model.state_dict())
    with pytest.raises(ModelError, match="the 2 ranks of tp hold other values or parts"):
        threaded(2, after_an_evaluation, models, plan="tp2")


def losses(world: World, models: list[nn.Module], plan: str, read: Any) -> list[float]:
    model = models[world.rank]

    def loss(output: Any, target: Tensor) -> Tensor:
        output, penalty = output if isinstance(output, tuple) else (output, read(model))
        return F.mse_loss(output, target) + penalty / 10

    return three_losses(sgd_engine(world, model, plan, loss, 0.1), drawn_batch(4))


def trained(plan: str, read: Any = None, kind: type[nn.Module] = Stack) -> list[float]:
    num_ranks = math.prod(int(term[2]) for term in plan.split() if term[:2] in ("dp", "tp", "pp"))
    torch.manual_seed(0)
    first = kind().double()
    models: list[nn.Module] = [first]
    for _ in range(num_ranks - 1):
        models.append(kind().double())
        models[-1].load_state_dict(first.state_dict())
    return threaded(num_ranks, losses, models, plan, read, plan=plan)[0]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3"])
def test_data_parallelism_has_everything_whole(plan: str, reader: str) -> None:
    expected = trained("dp1", READERS[reader])
    assert trained(plan, READERS[reader]) == pytest.approx(expected, rel=1e-12)


PARAMETER = r"the loss reads the parameter 'blocks\.0\.up\.weight', and "


@pytest.mark.parametrize(
    ("plan", "reader", "match"),
    [
        ("tp2", "all", PARAMETER + "tp2 holds parameters in parts"),
        ("tp2", "one", PARAMETER + "tp2 holds parameters in parts"),
        ("tp2", "kept", PARAMETER + "tp2 holds parameters in parts"),
        ("tp2", "last", r"the parameter 'head\.weight', and tp2 holds"),
        ("tp4:2d", "one", PARAMETER + "tp4 holds parameters in parts"),
        ("tp2", "hidden", r"a tensor \[4, 6\] .* the 2 ranks of tp hold other values or parts"),
        ("pp2 mb1", "all", PARAMETER + "another stage of pp holds it"),
        ("pp2:zbv mb2", "one", PARAMETER + "another stage of pp holds it"),
        ("pp2:1f1b mb2", "kept", PARAMETER + "another stage of pp holds it"),
        ("pp2 mb1", "hidden", r"the attribute 'hidden' of 'blocks\.0' is read on a rank"),
    ],
)
def test_what_a_rank_does_not_hold_whole_is_refused(plan: str, reader: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        trained(plan, READERS[reader])


@pytest.mark.parametrize("reader", ["last", "described"])
def test_what_the_last_stage_holds_is_read(reader: str) -> None:
    expected = trained("dp1", READERS[reader])
    assert trained("pp2:1f1b mb2", READERS[reader]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "tp4:2d", "pp2:zbv mb2", "pp2 tp2 mb2"])
def test_a_penalty_that_the_forward_returns_is_that_of_one_device(plan: str) -> None:
    expected = trained("dp1", kind=Penalised)
    assert trained(plan, kind=Penalised) == pytest.approx(expected, rel=1e-12)


def test_losses_of_libraries_read_outputs_and_targets_alone() -> None:
    assert is_of_a_library(cross_entropy)
    assert is_of_a_library(F.cross_entropy)
    assert is_of_a_library(nn.CrossEntropyLoss())
    assert not is_of_a_library(lambda output, targets: output)


class SameOnAllRanks:
    """An axis of two ranks that hold the same values; it counts what they compared."""

    size = 2

    def __init__(self) -> None:
        self.compared: list[Any] = []

    def gather_objects(self, value: Any) -> list[Any]:
        self.compared.append(value)
        return [value, value]


def watched(function: Any) -> tuple[LossReads, SameOnAllRanks]:
    """A loss of a layer whose weight is held in parts."""
    model, axis = nn.Linear(6, 6), SameOnAllRanks()
    tensor: Any = axis
    absent = {"weight": "it is in parts"}
    loss = partial(function, model)
    return LossReads(loss, model, original_parameters(model), absent, tensor), axis


def pair() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6, requires_grad=True), torch.ones(4, 6)


def test_a_watch_keeps_no_tensor_of_the_loss_alive() -> None:
    alive: list[int] = []

    def loss(model: Any, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            refs = []
            for _ in range(3):
                large = target * 2
                refs.append(weakref.ref(large))
            alive.append(sum(ref() is not None for ref in refs))
        return F.mse_loss(output, target)

    reads, _ = watched(loss)
    for _ in range(2):
        reads(*pair())
    assert alive == [1, 1]


def test_a_parameter_is_refused_that_only_a_later_call_reads() -> None:
    calls: list[int] = []

    def loss(model: Any, output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(calls))
        return F.mse_loss(output, target) + (model.weight.sum() if len(calls) > 2 else 0)

    reads, _ = watched(loss)
    for _ in range(2):
        reads(*pair())
    with pytest.raises(ModelError, match="reads the parameter 'weight', and it is in parts"):
        reads(*pair())


def test_a_loss_reads_sparse_tensors_and_those_under_vmap() -> None:
    weight = torch.eye(6).to_sparse()

    def loss(model: Any, output: Tensor, target: Tensor) -> Tensor:
        scaled = torch.sparse.mm(weight, output.T).T
        return torch.func.vmap(lambda a, b: (a - b).square().mean())(scaled, target).mean()

    reads, _ = watched(loss)
    assert reads(*pair()) == 0


def test_compiled_code_in_a_loss_is_compiled_once_and_not_looked_into() -> None:
    counter = CompileCounter()
    compiled = torch.compile(F.mse_loss, backend=counter, fullgraph=True)
    scale = torch.ones(6)
    reads, axis = watched(lambda model, output, target: compiled(output, target * scale))
    for _ in range(12):
        reads(*pair())
    assert counter.frame_count <= 2  # with the first watch, and with the later ones
    assert len(axis.compared) == 1


@pytest.mark.parametrize("is_module", [True, False])
def test_a_compiled_loss_is_watched_once_as_it_was_written(is_module: bool) -> None:
    model = nn.Linear(6, 6)

    class Loss(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) + self.penalty()

        def penalty(self) -> Any:
            return 0

    class Penalty(Loss):
        def penalty(self) -> Tensor:
            return model.weight.sum()

    def compiled(kind: type[Loss]) -> Any:
        function: Any = kind() if is_module else kind().forward
        fused: Any = torch.compile(function, backend="eager", fullgraph=True)
        assert not is_of_a_library(fused)
        originals = original_parameters(model)
        return LossReads(fused, model, originals, {"weight": "it is in parts"}, axis)

    axis: Any = SameOnAllRanks()
    plain = compiled(Loss)
    for _ in range(2):
        assert plain(*pair()) == 0
    with pytest.raises(ModelError, match="reads the parameter 'weight', and it is in parts"):
        compiled(Penalty)(*pair())
