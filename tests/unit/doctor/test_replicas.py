"""A flipped bit of a replica is found, and whose it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.doctor.findings import Symptom
from plait.engine.build import build
from plait.errors import RunError
from plait.run.loop import fit
from plait.run.replicas import CompareReplicas, Marks, ReplicaSums, damaged, mark
from tests.helpers.threaded import threaded

NET = nn.Linear(4, 4)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(world: World, plan: str, flips: bool) -> Any:
    net = nn.Linear(4, 4)
    net.load_state_dict(NET.state_dict())
    engine = build(
        net,
        plan,
        loss=squared,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    said: list[Symptom] = []

    def flip(module: nn.Module, args: Any) -> None:
        if engine.step_index == 2 and flips and world.rank == 1:
            with torch.no_grad():
                net.weight.view(-1).view(torch.int32)[5] ^= 1 << 9

    net.register_forward_pre_hook(flip)
    batches = [(torch.randn(2, 4), torch.randn(2, 4))] * 6
    hook = CompareReplicas(3, said.append)
    if not flips:
        fit(engine, batches, 6, [hook])
        return said
    with pytest.raises(RunError, match=r"corruption: rank 1 in step 3, parameter weight"):
        fit(engine, batches, 6, [hook])
    return said


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp3"])
def test_a_flipped_bit_is_found_at_the_next_comparison(plan: str) -> None:
    size = int(plan[2])
    told = threaded(size, train, plan, True, plan=plan)
    assert [finding.rank for finding in told[0]] == [1]


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3"])
def test_healthy_replicas_say_nothing(plan: str) -> None:
    assert threaded(2, train, plan, False, plan=plan) == [[], []]


def report(value: int, changed: bool = False) -> ReplicaSums:
    place = ("weight", None, 0, 4)
    marks: Marks = {place: value}
    return ReplicaSums(marks, frozenset({place} if changed else ()))


def test_the_odd_one_of_three_is_at_fault_and_of_two_the_one_that_changed() -> None:
    found = damaged([report(1), report(1), report(2)], 4)
    assert found is not None
    assert (found.rank, found.step) == (2, 4)
    found = damaged([report(1, changed=True), report(2)], 4)
    assert found is not None
    assert found.rank == 0
    found = damaged([report(1), report(2)], 4)
    assert found is not None
    assert found.rank is None
    assert damaged([report(1), report(1)], 4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mark_differs_with_every_bit(dtype: torch.dtype) -> None:
    values = torch.ones(3, dtype=dtype)
    whole = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    before = mark(values)
    for bit in range(8 * dtype.itemsize - 1):
        whole[1] ^= 1 << bit
        assert mark(values) != before
        whole[1] ^= 1 << bit
