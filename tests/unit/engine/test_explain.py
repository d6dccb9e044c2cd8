"""Errors of torch that a user causes, in sentences that name the thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.explain import explained, memory_error
from plait.errors import DataError, ModelError, OutOfMemory
from plait.models import losses, make
from plait.plan import Plan
from tests.helpers.threaded import threaded

TOKENS = torch.arange(8).view(2, 4)


def step(
    inputs: Tensor, targets: Tensor, loss: Any = losses.cross_entropy, plan: str = "dp1"
) -> None:
    """One step of a small GPT with 16 tokens and 99 positions."""

    def on(world: World) -> None:
        with torch.device("meta"):
            model = make(
                "gpt",
                num_hidden_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                intermediate_size=8,
                vocab_size=16,
                max_position_embeddings=99,
            )
        engine = build(
            model,
            plan,
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            options=Options(),
            world=world,
        )
        engine.step((inputs, targets))

    threaded(Plan.parse(plan).world_size, on, plan=plan)


@pytest.mark.parametrize("token", [16, 70, -1])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    wrong = TOKENS.clone()
    wrong[1, 2] = token
    with pytest.raises(
        DataError, match=rf"step 1: token {token} is outside the vocabulary of 16 \(0 to 15\)"
    ):
        step(wrong, TOKENS)


def test_a_target_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(DataError, match="target 23 is outside the vocabulary of 16"):
        step(TOKENS, TOKENS + 16)


def test_numbers_that_no_part_of_the_vocabulary_holds_are_named() -> None:
    with pytest.raises(DataError, match="token 17 is outside the vocabulary of 16"):
        step(TOKENS + 10, TOKENS, plan="tp2")
    with pytest.raises(DataError, match="target 17 is outside the vocabulary of 16"):
        step(TOKENS, TOKENS + 10, plan="tp2")


def test_float_tokens_are_named() -> None:
    with pytest.raises(DataError, match=r"the inputs are torch.float32, .* integers"):
        step(TOKENS.float(), TOKENS)


class Conditioned(nn.Module):
    """A model that looks up rows of its own, and gets real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs + self.rows(torch.arange(3)))


def test_an_error_of_shapes_is_no_error_of_tokens() -> None:
    engine = plait.build(
        Conditioned(), "dp1", loss=lambda output, _: output.mean(), optimizer=torch.optim.SGD
    )
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        engine.step((torch.ones(5, 4), torch.ones(5)))


class Timed(nn.Module):
    """A model that looks up a label, and has a time that is no row of a table."""

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.rows = nn.Embedding(3, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.linear(self.fault(times[:, None]) + self.rows(labels))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda times: times.double().cos(), "must have the same dtype"),
        (
            lambda times: times @ torch.ones(1, 4),
            "Long and Float|found Float|long int",
        ),
        (lambda times: times[:, torch.ones(7, dtype=torch.bool)], "shape of the mask"),
    ],
)
def test_a_time_is_no_token_where_torch_refuses_something_else(
    fault: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    engine = plait.build(
        Timed(fault), "dp1", loss=lambda output, _: output.mean(), optimizer=torch.optim.SGD
    )
    with pytest.raises((RuntimeError, IndexError), match=text):
        engine.step(((torch.tensor([900, 7]), torch.tensor([0, 2])), torch.ones(2)))


def test_a_loss_of_none_is_named() -> None:
    with pytest.raises(ModelError, match="the loss function returned None; it must return"):
        step(TOKENS, TOKENS, lambda output, targets: None)


def test_memory_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"rank 3 asked in step 7 for [\d,.]+ GB .*remat:full"),
        explained(memory_error(3, "step 7")),
    ):
        torch.empty(1 << 58)
    with (
        pytest.raises(OutOfMemory, match="rank 0 is out of memory in step 1: CUDA out of memory"),
        explained(memory_error(0, "step 1")),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert OutOfMemory.exit_code == 1


def test_other_errors_stay_themselves() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explained(memory_error(0, "step 1")):
        nn.Linear(3, 4)(torch.zeros(2, 5))


@pytest.mark.quick
def test_a_label_outside_the_classes_is_named() -> None:
    def on(world: World) -> None:
        model = nn.Linear(2, 3)
        engine = build(
            model,
            "dp1",
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            options=Options(),
            world=world,
        )
        engine.step((torch.ones(2, 2), torch.tensor([0, 5])))

    with pytest.raises(DataError, match=r"step 1: label 5 is outside the classes; .*num_labels"):
        threaded(1, on, plan="dp1")
