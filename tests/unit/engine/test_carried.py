"""A tensor that the forward of one micro-batch reads of another's is told of once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from tests.helpers.warned import warnings_of_steps

CARRIES = "the forward carries 'hidden' from one micro-batch to the next"


class Recurrent(nn.Module):
    """A language model's cell, which goes on from the state of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        if self.hidden is None:
            self.hidden = x.new_zeros(1, len(x), 4)
        y, self.hidden = self.rnn(x.unsqueeze(1), self.hidden.detach())
        out: Tensor = self.head(y[:, 0])
        return out


class LongShort(Recurrent):
    """The same with two states in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn: nn.Module = nn.LSTM(4, 4, batch_first=True)
        self.states: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        states = self.states or (x.new_zeros(1, len(x), 4), x.new_zeros(1, len(x), 4))
        y, self.states = self.rnn(x.unsqueeze(1), tuple(one.detach() for one in states))
        out: Tensor = self.head(y[:, 0])
        return out


class Codebook(nn.Module):
    """Subtracts a moving mean of its samples, written by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        y: Tensor = self.linear(x) - self.mean
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


class Innocent(nn.Module):
    """Keeps tables, sums, statistics of norms, and what a forward sets before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.table: Tensor | None = None
        self.state = torch.zeros(4, 4)
        self.sums: Tensor
        self.register_buffer("sums", torch.zeros(4))
        self.counts = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        if self.table is None or self.table.shape[0] != len(x):
            self.table = torch.ones(len(x), 4)
        self.state = torch.zeros_like(x)
        for _ in range(2):
            self.state = self.state * 0.5 + x
        self.sums += x.detach().sum(0)
        self.counts = self.counts + (x > 0).sum(0)
        y: Tensor = self.norm(self.linear(x)) * self.table + self.state
        return y


def said(model: nn.Module, plan: str, ranks: int = 1) -> list[str]:
    """The warnings of three steps about what forwards carry, each once."""
    texts = warnings_of_steps(model, plan, (4, 4), ranks)
    return sorted({one for one in texts if "carries" in one})


@pytest.mark.parametrize("plan", ["dp1 mb2", "dp2 mb2", "pp2 mb2", "dp2:zero3 mb2"])
def test_a_hidden_state_under_micro_batches_is_told_once(plan: str) -> None:
    (text,) = said(Recurrent(), plan, ranks=1 if plan.startswith("dp1") else 2)
    assert CARRIES in text
    assert "mb2' runs it 2 times in a step" in text
    assert "write mb1" in text


def test_states_in_a_tuple_and_a_moving_mean_are_told() -> None:
    (text,) = said(LongShort(), "dp1 mb2")
    assert "carries 'states' from" in text
    (text,) = said(Codebook(), "dp1 mb4")
    assert "carries 'mean' from" in text
    assert "runs it 4 times" in text


@pytest.mark.parametrize("model", [Recurrent(), Codebook()])
def test_one_forward_of_a_step_is_not_told(model: nn.Module) -> None:
    assert said(model, "dp1") == []
    assert said(model, "dp2", ranks=2) == []


def test_tables_sums_and_statistics_of_norms_are_not_told() -> None:
    assert said(Innocent(), "dp1 mb2") == []


class Tree(nn.Module):
    """A layer whose attribute has an entry that is the attribute again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.root: dict[str, object] = {}
        self.root["root"] = self.root

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        out: Tensor = self.linear(x)
        return out


def test_an_attribute_that_holds_itself_is_passed_by() -> None:
    engine = plait.build(Tree(), "mb2", loss=F.mse_loss, optimizer=torch.optim.AdamW)
    for _ in range(2):
        engine.step((torch.ones(4, 4), torch.zeros(4, 4)), trace=False)
