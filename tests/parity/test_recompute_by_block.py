"""`remat:auto`: blocks with words of their own equal one device, and keep what the words say."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.comm import World
from plait.errors import PlanError
from tests.helpers.threaded import threaded
from tests.parity import families, harness
from tests.parity.harness import TOLERANCE, check
from tests.parity.test_recompute import Counted

Run = Callable[..., list[Any]]
MIXED = ("full", "none", "selective", "none")
DEEP = families.DEEP["gpt-deep"]
PEAK = replace(
    DEEP,
    keys={**DEEP.keys, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2},
    num_steps=1,
)


@pytest.mark.parametrize(
    "plan",
    [
        "dp2",
        "dp2:zero2 mb2",
        "dp2:zero3",
        "pp2:1f1b mb4",
        "pp2:interleaved,v2 mb4",
        "pp2:zb-h1 mb4",
        "dp2:zero3 pp2:1f1b mb2",
    ],
)
@pytest.mark.parametrize("words", [MIXED, MIXED[::-1]], ids=["ends-none", "starts-none"])
def test_equals_one_device(ranks: Run, plan: str, words: tuple[str, ...]) -> None:
    outcome = check(ranks, f"{plan} remat:auto precision:float64", DEEP, remat=words)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["tp2", "tp2:1d,sp", "tp2 dp2:zero1", "tp4:2d"])
@pytest.mark.parametrize("words", [("full", "none"), ("none", "selective")])
def test_split_layers_equal_one_device(ranks: Run, plan: str, words: tuple[str, ...]) -> None:
    text = f"{plan} remat:auto precision:float64"
    outcome = check(ranks, text, "split-llama", remat=words)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["dp2 ep2", "dp2:zero3 ep2", "dp2 ep2 mb2"])
@pytest.mark.parametrize("words", [("none", "full"), ("selective", "none"), ("full", "selective")])
def test_a_dense_block_and_one_of_experts_equal_one_device(
    ranks: Run, plan: str, words: tuple[str, ...]
) -> None:
    text = f"{plan} remat:auto precision:float64"
    outcome = check(ranks, text, "deepseek-balanced", 5, remat=words)
    assert outcome.largest <= TOLERANCE, outcome


def operations(world: World, words: tuple[str, ...]) -> tuple[int, int]:
    """Of one step: products of the way forward, and activations."""
    family = replace(families.FAMILIES["gpt"], num_steps=1)
    text = "dp1 remat:auto precision:float64"
    engine = harness.make_engine(world, text, family, {"remat": words})
    with Counted() as counted:
        harness.train(engine, family, 4)
    return counted.calls["addmm"], counted.calls["gelu"]


def test_each_block_repeats_what_its_own_word_says() -> None:
    """Of two blocks, each with six products (five are repeated) and one activation."""
    cases = {
        ("none", "none"): (12, 2),
        ("full", "none"): (17, 3),
        ("none", "selective"): (12, 3),
        ("selective", "full"): (17, 4),
        ("full", "full"): (22, 4),
    }
    found = {words: threaded(1, operations, words)[0] for words in cases}
    assert found == cases


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.now -= num_bytes


def peak_bytes(world: World, text: str, words: tuple[str, ...] | None) -> int:
    """The most bytes of tensors that live at once in a step."""
    engine = harness.make_engine(world, f"dp1 {text} precision:float64", PEAK, {"remat": words})
    with Live() as live:
        harness.train(engine, PEAK, 64)
    return live.peak


def test_the_measured_peak_lies_between_none_and_full() -> None:
    none, full = (threaded(1, peak_bytes, f"remat:{word}", None)[0] for word in ("none", "full"))
    between = [
        threaded(1, peak_bytes, "remat:auto", ("full",) * count + ("none",) * (4 - count))[0]
        for count in range(5)
    ]
    assert between[0] == none
    assert between[4] == full
    assert none > between[1] > between[2] > between[3] >= full


def test_a_build_without_words_or_with_others_is_refused() -> None:
    family = families.FAMILIES["gpt"]

    def build(world: World, words: Any) -> str:
        try:
            harness.make_engine(world, "dp1 remat:auto", family, {"remat": words})
        except PlanError as error:
            return str(error)
        return ""

    found = [threaded(1, build, words)[0] for words in (None, ("full",), ("full", "some"))]
    assert "pass Options(remat=plait.estimate(config, plan, cluster).remat)" in found[0]
    assert "the choice has 1 words and the model 2 blocks (blocks.0 to blocks.1)" in found[1]
    assert "the choice of blocks has the word 'some'" in found[2]
