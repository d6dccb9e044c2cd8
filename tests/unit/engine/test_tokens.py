"""The tokens of a step: those that the loss counts, else every position of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.models.losses import cross_entropy

SAMPLES, POSITIONS, VOCAB = 5, 7, 11


class Words(nn.Module):
    """A chain of two layers over tokens [B, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def tokens_of(world: World, plan: str, loss: Callable[..., Any]) -> int:
    engine = plait.build(
        Words().layers,
        plan,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    share = SAMPLES if world.axis("dp").rank == 0 else SAMPLES - 1
    tokens = torch.arange(share * POSITIONS).view(share, POSITIONS) % VOCAB
    targets = tokens.clone()
    targets[0, 0] = -100
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the mean over samples")  # of uneven targets
        return engine.step((tokens, targets)).tokens


@pytest.mark.parametrize("plan", ["dp2 mb2", "pp2 mb2", "pp2:pipedream mb2"])
def test_a_mean_over_samples_counts_the_batchs_tokens(ranks: Any, plan: str) -> None:
    samples = 2 * SAMPLES - 1 if "dp2" in plan else SAMPLES
    assert set(ranks(2, tokens_of, plan, mean_loss, plan=plan)) == {samples * POSITIONS}


def test_a_loss_that_counts_is_believed(ranks: Any) -> None:
    assert ranks(1, tokens_of, "dp1", cross_entropy, plan="dp1") == [SAMPLES * POSITIONS - 1]


def test_inputs_that_are_no_sequences_count_samples(ranks: Any) -> None:
    assert ranks(1, samples_of, plan="dp1") == [SAMPLES]


def samples_of(world: World) -> int:
    engine = plait.build(
        nn.Linear(3, 2),
        "dp1",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    return engine.step((torch.ones(SAMPLES, 3), torch.ones(SAMPLES, 2))).tokens
