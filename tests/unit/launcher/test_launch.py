"""What `launch` refuses and joins, before and without any process."""

from __future__ import annotations

import os
from typing import Any

import pytest

from plait.errors import PlaitError, WorldSizeError
from plait.launcher import JoinedWorld, joined_world, launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_a_world_is_joined_by_torchruns_variables() -> None:
    assert joined_world(TORCHRUN) == JoinedWorld(rank=3, world_size=4, local_rank=1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_no_world_is_joined_when_a_variable_lacks(missing: str) -> None:
    assert (
        joined_world({name: value for name, value in TORCHRUN.items() if name != missing}) is None
    )


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_among_several_is_not_alone_because_nobody_said_where_to_meet(missing: str) -> None:
    """Each of them would train the whole model for itself."""
    told = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(WorldSizeError, match=f"RANK is 3 and WORLD_SIZE is 4, but {missing} is"):
        joined_world(told)
    assert joined_world({**told, "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("name", "told", "range_"),
    [
        ("RANK", "", "0 to 3"),
        ("RANK", "one", "0 to 3"),
        ("RANK", "4", "0 to 3"),
        ("RANK", "-1", "0 to 3"),
        ("LOCAL_RANK", "x", "0 to 3"),
        ("WORLD_SIZE", "0", "1 to"),
        ("MASTER_PORT", "99999", "0 to 65535"),
    ],
)
def test_a_variable_that_is_no_number_in_its_range_is_named(
    name: str, told: str, range_: str
) -> None:
    with pytest.raises(WorldSizeError, match=f"variable {name} is '{told}'.* from {range_}"):
        joined_world({**TORCHRUN, name: told})


def test_inside_a_world_main_runs_here_and_its_result_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launch(os.getpid) == [os.getpid()]
    assert launch(os.getpid, nproc=4) == [os.getpid()]


def test_inside_a_world_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        WorldSizeError, match="2 ranks are asked for, but this process is rank 3 of a world of 4"
    ):
        launch(os.getpid, nproc=2)


@pytest.mark.parametrize("nproc", [None, 0, -1])
def test_a_number_of_ranks_is_needed(nproc: int | None) -> None:
    with pytest.raises(WorldSizeError, match="1 or more"):
        launch(os.getpid, nproc=nproc)


def test_a_function_that_cannot_travel_is_refused() -> None:
    with pytest.raises(PlaitError, match="top level of a module"):
        launch(lambda: 1, nproc=2)
    with pytest.raises(PlaitError, match="plain arguments"):
        launch(print, (number for number in ()), nproc=2)


@pytest.mark.parametrize("nproc", ["2", 2.0])
def test_a_number_of_ranks_is_whole(nproc: Any) -> None:
    with pytest.raises(WorldSizeError, match="nproc must be a whole number of ranks, as in"):
        launch(os.getpid, nproc=nproc)
