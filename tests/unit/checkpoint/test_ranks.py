"""The same on real ranks: saved on four, loaded on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import Box, Checkpoint, Shard, save
from plait.comm import World
from plait.errors import CheckpointError
from plait.mesh import shard_range

SHAPE = (6, 7)
FULL = torch.arange(42.0).view(SHAPE)


def zero_shard(world: World) -> Shard:
    """This rank's flat range of its half of the rows: tp2 on rows, the rest ZeRO."""
    axis = world.axis("world")
    box = Box((axis.rank % 2 * 3, 0), (3, 7))
    start, stop = shard_range(box.numel, axis.size // 2, axis.rank // 2)
    return Shard(
        "w", SHAPE, box, start, stop, FULL[box.within(Box.whole(SHAPE))].reshape(-1)[start:stop]
    )


def save_piece(world: World, path: Path) -> None:
    axis = world.axis("world")
    save(
        path,
        [zero_shard(world)],
        {"ranks": axis.size},
        rank=axis.rank,
        world_size=axis.size,
        gather=axis.gather_objects,
    )


def save_nothing_on_one_rank(world: World, path: Path) -> str:
    axis = world.axis("world")
    shards = [zero_shard(world)] if axis.rank else []
    try:
        save(path, shards, {}, rank=axis.rank, world_size=axis.size, gather=axis.gather_objects)
    except CheckpointError as error:
        return str(error)
    return "saved"


def load_columns(world: World, path: Path) -> list[float]:
    """This rank's half of the columns: another axis of the tensor than the one it was cut along."""
    axis = world.axis("world")
    low, high = shard_range(7, axis.size, axis.rank)
    mine = torch.zeros(6, high - low)
    Checkpoint.open(path).load([Shard.of_box("w", SHAPE, Box((0, low), (6, high - low)), mine)])
    assert torch.equal(mine, FULL[:, low:high])
    return mine.flatten().tolist()


def test_saved_on_four_ranks_loaded_on_two(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ranks(4, save_piece, tmp_path / "step-1")
    assert len(list((tmp_path / "step-1").glob("*.safetensors"))) == 4
    found = ranks(2, load_columns, tmp_path)
    assert sorted(value for part in found for value in part) == FULL.flatten().tolist()


def test_a_rank_without_its_piece_is_refused_by_all(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    messages = ranks(2, save_nothing_on_one_rank, tmp_path / "step-1")
    assert (
        messages == ["'w' has 42 elements and the shards of all ranks hold 21: one is missing"] * 2
    )
