"""What a rank holds of parameters and of what a forward keeps for backward, against one device: by
live tensors and hooks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.plan import Plan
from tests.unit.parallel.tensor.pairs import run_ranks, split_with_values

WIDTH = 64
HEADS = 8
SEQUENCE = 16
BATCH = 8


def gpt() -> Any:
    torch.manual_seed(0)
    return models.make(
        "gpt",
        num_hidden_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        vocab_size=32,
        max_position_embeddings=SEQUENCE,
    )


def kept_bytes(block: nn.Module, x: Tensor) -> int:
    """Of the tensors that autograd holds after a forward, each memory once; parameters are not
    counted.
    """
    held = {param.untyped_storage().data_ptr() for param in block.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x)
    y.sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


def parameter_bytes(block: nn.Module) -> int:
    return sum(param.untyped_storage().nbytes() for param in block.parameters())


def on_ranks(plan: str) -> list[tuple[int, int]]:
    copies = [gpt() for _ in range(Plan.parse(plan).world_size)]

    def rank(world: World) -> tuple[int, int]:
        model = copies[world.rank]
        split = split_with_values(world, model, models.roles_for(model), plan)
        split.context.layout = split.mode.residual
        x = (
            split.mode.residual.local_part(torch.zeros(BATCH, SEQUENCE, WIDTH))
            .clone()
            .requires_grad_()
        )
        return parameter_bytes(model.blocks[0]), kept_bytes(model.blocks[0], x)

    return run_ranks(plan, rank)


@pytest.fixture(scope="module")
def whole() -> tuple[int, int]:
    model = copy.deepcopy(gpt())
    x = torch.zeros(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    return parameter_bytes(model.blocks[0]), kept_bytes(model.blocks[0], x)


@pytest.mark.parametrize(
    ("plan", "copies"),
    [("tp4:1d,sp", 1), ("tp4:2d", 1), ("tp8:1d,sp", 1), ("tp8:2.5d,depth2", 2), ("tp8:3d", 1)],
)
def test_activations_are_cut_by_the_number_of_ranks(
    whole: tuple[int, int], plan: str, copies: int
) -> None:
    """Weights too, but for the layers of a depth, which hold the same; norms and biases are small,
    and held more often.
    """
    size = Plan.parse(plan).world_size
    for parameters, activations in on_ranks(plan):
        assert activations == pytest.approx(whole[1] / size, rel=0.01)
        assert whole[0] * copies / size <= parameters <= 1.1 * whole[0] * copies / size


@pytest.mark.parametrize("size", [4, 8])
def test_1d_holds_the_residual_stream_whole(whole: tuple[int, int], size: int) -> None:
    """V. Korthikanti et al., section 4.2.1: between a row and the next column nothing is cut."""
    stream = BATCH * SEQUENCE * WIDTH * 4
    for parameters, activations in on_ranks(f"tp{size}"):
        assert parameters <= 1.1 * whole[0] / size
        uncut = activations - whole[1] / size
        assert uncut == pytest.approx(
            4 * stream * (1 - 1 / size), rel=0.02
        )  # inputs of two norms, and of two columns
