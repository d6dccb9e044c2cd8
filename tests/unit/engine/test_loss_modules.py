"""What a loss that is a module changes in itself is told of, as what the forward changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded

COMPUTES = "data ranks have other values of 'loss.centre'"
CARRIES = "carries 'loss.centre' from one micro-batch to the next"
COUNTS = "counts in 'loss.calls'"
LEAVES_OUT = "the loss has changed its buffers 'loss.centre'"


class Centred(nn.Module):
    """Subtracts a moving mean of the outputs, as the loss of DINO, and counts its calls."""

    def __init__(self, *, hidden: bool = False) -> None:
        super().__init__()
        self.hidden = hidden
        self.calls = 0
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """[samples, 4] and the same -> []."""
        self.calls += 1
        loss = (output - self.centre - targets).square().mean()
        moved = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        if self.hidden:
            self.centre.data.copy_(moved)
        else:
            self.centre = moved
        return loss


class Constant(nn.Module):
    """A loss with weights in a buffer, which it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(4))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """[samples, 4] and the same -> []."""
        return ((output - targets).square() * self.get_buffer("weights")).mean()


class Trainer(nn.Module):
    """A module that holds the model beside the loss, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.crit = Centred()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """[samples, 4] and the same -> []."""
        loss: Tensor = self.crit(output, targets)
        return loss


Loss = Callable[[Tensor, Tensor], Tensor]

of_file = Centred()


def by_name(output: Tensor, targets: Tensor) -> Tensor:
    """[samples, 4] and the same -> [], by a module of this file."""
    loss: Tensor = of_file(output, targets)
    return loss


def scaled(factor: float, module: nn.Module, output: Tensor, targets: Tensor) -> Tensor:
    """[samples, 4] and the same -> []."""
    loss: Tensor = factor * module(output, targets)
    return loss


def closed(module: nn.Module) -> Loss:
    """A loss that reaches a module in a closure."""
    return lambda output, targets: 1.0 * module(output, targets)


def said(
    make_loss: Callable[[nn.Module], Loss],
    plan: str,
    ranks: int = 1,
    *,
    model: nn.Module | None = None,
    path: Path | None = None,
) -> list[str]:
    """The warnings of three steps and a save, each once."""

    whole = model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def train(world: World) -> None:
        own = copy.deepcopy(whole)
        draw = torch.Generator().manual_seed(5)
        batches = [(torch.randn(8, 4, generator=draw), torch.zeros(8, 4)) for _ in range(3)]
        engine = plait.build(
            own,
            plan,
            loss=make_loss(own),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        for batch in engine.prepare(batches):
            engine.step(batch)
        if path is not None:
            engine.save(path)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(ranks, train, plan=plan)
    return sorted({str(one.message) for one in caught})


@pytest.mark.parametrize("hidden", [False, True])
def test_a_buffer_of_the_loss_is_told_where_data_ranks_differ(hidden: bool) -> None:
    (text,) = said(lambda _: Centred(hidden=hidden), "dp2", 2)
    assert COMPUTES in text


@pytest.mark.parametrize(
    "make_loss",
    [
        lambda _: Centred().forward,
        lambda _: partial(scaled, 1.0, Centred()),
        lambda _: closed(Centred()),
    ],
    ids=["method", "partial", "closure"],
)
def test_a_module_is_found_in_whatever_reaches_it(make_loss: Callable[[nn.Module], Loss]) -> None:
    (text,) = said(make_loss, "dp2", 2)
    assert COMPUTES in text


def test_a_module_that_a_function_names_is_found() -> None:
    texts = said(lambda _: by_name, "dp1 mb2")
    assert any(CARRIES in text for text in texts)


@pytest.mark.parametrize("plan", ["dp1 mb2", "pp2 mb2"])
def test_what_the_loss_carries_and_counts_is_told(plan: str) -> None:
    counts, carries = said(lambda _: Centred(), plan, 1 + plan.startswith("pp"))
    assert "mb2' runs it for each" in counts + carries
    assert COUNTS in counts or COUNTS in carries
    assert CARRIES in counts or CARRIES in carries


def test_a_module_around_the_model_is_looked_at_without_the_model() -> None:
    (text,) = said(lambda model: Trainer(model).loss, "dp2", 2)
    assert "other values of 'loss.crit.centre'" in text


def test_a_checkpoint_says_what_it_leaves_out(tmp_path: Path) -> None:
    (text,) = said(lambda _: Centred(), "dp1", path=tmp_path / "saved")
    assert LEAVES_OUT in text
    assert "loss.state_dict() beside engine.save" in text


def test_constants_of_a_loss_are_not_told(tmp_path: Path) -> None:
    assert said(lambda _: Constant(), "dp2 mb2", 2, path=tmp_path / "constant") == []
    weighted = nn.CrossEntropyLoss(weight=torch.ones(4))
    assert said(lambda _: weighted, "dp2", 2, path=tmp_path / "weighted") == []


def test_a_module_of_the_model_in_the_loss_is_told_as_the_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Centred())
    model.forward = model[0].forward  # type: ignore[method-assign]

    def of_model(own: nn.Module) -> Loss:
        return own.get_submodule("1")

    texts = said(of_model, "dp1 mb2", model=model)
    assert all("'loss." not in text for text in texts)
