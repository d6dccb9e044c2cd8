"""Tensors of a GPU over backends of processors, with copies forced where there is no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.comm.backends.base import Backend
from plait.comm.backends.through_host import ThroughHost
from plait.comm.devices import backend_for, group_kind
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from tests.helpers.pool import mesh_of
from tests.parity.harness import TOLERANCE, check


class AlwaysCopied(ThroughHost):
    """What a GPU's tensors meet: every operation works on copies."""

    def _is_on_host(self, tensor: Tensor) -> bool:
        return False


def through_copies(world: World, backend: Backend) -> Backend:
    return AlwaysCopied(backend)


def run(n: int, fn: Any, *args: Any, plan: str | Mesh | None = None) -> list[Any]:
    return simulate(mesh_of(plan, n), fn, *args, wrap=through_copies)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("dp2:zero3 mb2", "gpt"),
        ("dp3:ring", "gpt"),
        ("tp4:2d", "split-llama"),
        ("pp2:zbv tp2:1d,sp mb4", "split-llama"),
        ("cp2:ring", "long-llama"),
        ("dp2 ep2", "mixtral-plain"),
        ("dp2:server", "mlp"),
    ],
)
def test_strategies_by_copies_on_the_host_are_equal_to_one_device(plan: str, family: str) -> None:
    assert check(run, f"{plan} precision:float64", family, 8).largest < TOLERANCE


def test_a_result_reaches_the_tensor_that_was_given() -> None:
    def act(world: World) -> tuple[list[float], list[float], list[float]]:
        axis = world.axis("dp")
        mine = torch.full((2,), float(axis.rank + 1))
        axis.all_reduce(mine).wait()
        parts = torch.arange(4.0) + axis.rank
        own = torch.empty(2)
        axis.reduce_scatter(own, parts).wait()
        told = torch.full((1,), float(axis.rank))
        axis.broadcast(told, 1).wait()
        return mine.tolist(), own.tolist(), told.tolist()

    assert run(2, act) == [([3.0, 3.0], [1.0, 3.0], [1.0]), ([3.0, 3.0], [5.0, 7.0], [1.0])]


def test_ranks_with_a_gpu_each_take_nccl_and_ranks_that_share_one_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = torch.device("cuda", 0)
    answer = partial(backend_for, place)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (answer("auto"), answer("gloo")) == ("native", "gloo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert answer("auto") == "auto"
    assert backend_for(torch.device("cpu"), "auto") == "auto"
    kinds = [group_kind(place, name) for name in ("native", "auto", "gloo")]
    assert kinds == ["nccl", "gloo", "gloo"]
    assert group_kind(torch.device("cpu"), "native") == "gloo"
