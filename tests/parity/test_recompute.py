"""Recomputation under every schedule, against one device; and that it recomputes what its policy
says, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import World
from plait.parallel.pipeline.schedules import SCHEDULES
from tests.helpers.threaded import threaded
from tests.parity import families, harness
from tests.parity.generator.cell import Cell
from tests.parity.generator.run import judge

Run = Callable[..., list[Any]]
KEYS = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "vocab_size": 11,
    "max_position_embeddings": 4,
}


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_one_device(ranks: Run, schedule: str, policy: str) -> None:
    virtual = ",v2" if schedule == "interleaved" else ""
    verdict = judge(
        ranks,
        Cell(f"pp2:{schedule}{virtual} mb4 remat:{policy} precision:float64", "gpt", KEYS, 4, 3),
    )
    assert verdict.status == "ok", verdict


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(world: World, policy: str) -> tuple[int, int]:
    """Of one step: products of the way forward, and activations."""
    family = replace(families.FAMILIES["gpt"], num_steps=1)
    engine = harness.make_engine(world, f"dp1 remat:{policy} precision:float64", family, {})
    with Counted() as counted:
        harness.train(engine, family, 4)
    return counted.calls["addmm"], counted.calls["gelu"]


def test_selective_repeats_what_is_cheap_and_full_repeats_the_block() -> None:
    """Two blocks of six products and one activation each; the head has no bias, so it is none of
    these.

    Recomputing a block stops before its last product, whose output nobody keeps.
    """
    found = {policy: threaded(1, operations, policy)[0] for policy in ("none", "selective", "full")}
    assert found == {"none": (12, 2), "selective": (12, 4), "full": (22, 4)}
