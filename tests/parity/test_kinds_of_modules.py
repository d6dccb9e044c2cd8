"""Modules of many fields train as a plain loop on one device does, or are refused in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plait.errors import ModelError, PlaitError
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity import plain_loop
from tests.parity.harness import TOLERANCE

PLANS = ("dp2", "dp2:zero3", "tp2", "pp2", "cp2:ring", "pp2 mb4")
DRAWING = ("Variational", "Shuffled")  # ranks that are threads share one generator
NO_SEQUENCE = "does not run where the second dim of its inputs, which cp cuts as a sequence"
NO_BLOCKS = "cuts sequences inside the repeated blocks"
REFUSED = {
    **dict.fromkeys(("UNet", "Images", "Moving", "Lists", "Siamese"), NO_SEQUENCE),
    **dict.fromkeys(
        ("Hyper", "Nested", "Bags", "OwnBackward", "Reversible", "Cycles", "Dataclass"), NO_SEQUENCE
    ),
    **dict.fromkeys(("WithNone", "Swapped", "Shuffled", "Variational"), NO_SEQUENCE),
    **dict.fromkeys(("Translator", "Cell", "LinearAttention"), NO_BLOCKS),
    "Graph": "mixes the positions of a sequence",
}
TOO_FEW = "layers, the model has 1|calls none that has parameters"
OTHER_ORDER = "in the same order"
ACROSS = {
    "TopOne": r"not change shape with values; .experts\.\d. gets rows that are chosen by values",
    "Lists": TOO_FEW,
    "Shuffled": OTHER_ORDER,
    "Swapped": OTHER_ORDER,
    "Reversible": "is called without autograd although 'weight' is trained",
}


@pytest.fixture
def one_generator(monkeypatch: Any) -> Iterator[None]:
    """Pipelines take the generator as untouched: threads share it, and nothing is drawn."""
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: state)
        yield


def expected_refusal(kind: str, plan: str) -> str:
    """The words of a refusal; empty where the plan trains the module."""
    if kind == "Spectral":
        return "'filter' of Spectral is complex"
    if plan.startswith("cp"):
        return REFUSED.get(kind, "")
    if plan.startswith("pp"):
        return ACROSS.get(kind, "")
    return "zero2" if plan == "dp2:zero3" and kind in ("Shuffled", "Swapped") else ""


def cell(run: Any, kind: str, plan_text: str) -> None:
    plan = Plan.parse(f"{plan_text} precision:float64")
    arguments = plain_loop.trained, kind, str(plan)
    words = expected_refusal(kind, plan_text)
    if words:
        expected = PlaitError if run is threaded else Exception
        with pytest.raises(expected, match=words):
            run(plan.world_size, *arguments, plan=str(plan))
        return
    by_rank = run(plan.world_size, *arguments, plan=str(plan))
    assert plain_loop.distance_apart(kind, plan, by_rank) < TOLERANCE


@pytest.mark.filterwarnings("ignore:the forward computes buffers:UserWarning")  # as it means to
@pytest.mark.filterwarnings("ignore:the forward carries:UserWarning")  # as it means to
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", sorted(plain_loop.CASES.keys() - {*DRAWING}))
def test_trains_as_one_device(one_generator: None, kind: str, plan: str) -> None:
    cell(threaded, kind, plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", DRAWING)
def test_draws_as_one_device(ranks: Any, kind: str, plan: str) -> None:
    cell(ranks, kind, plan)


def test_layers_in_another_order_are_named(one_generator: None) -> None:
    plan = "dp2:zero3 precision:float64"
    with pytest.raises(ModelError, match=re.escape("layers.")) as caught:
        threaded(2, plain_loop.trained, "Swapped", plan, plan=plan)
    assert "random.Random(step)" in str(caught.value)


@pytest.mark.parametrize("second", ["a tensor", "a log"])
def test_a_loss_with_logs_is_no_sum_and_count(monkeypatch: Any, second: str) -> None:
    """The second of two terms would be taken as the count, silently."""

    def loss(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
        value = plain_loop.distance(output, targets)
        return value, (value * 2 if second == "a tensor" else {"accuracy": 0.5})

    monkeypatch.setitem(
        plain_loop.CASES, "Hyper", plain_loop.Case(plain_loop.CASES["Hyper"].batch, loss)
    )
    with pytest.raises(ModelError, match=r"a tuple means \(sum, count\)"):
        threaded(2, plain_loop.trained, "Hyper", "dp2 precision:float64", plan="dp2")
