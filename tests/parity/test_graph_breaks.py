"""A block is one graph under every plan that leaves its layers whole. Elsewhere graphs end where a
layer talks to other ranks, draws, or leaves a product for later (decision 0017), and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.models.adapter_parts import AdapterSettings
from plait.plan import Plan
from tests.parity.families import Family, family_of
from tests.parity.graph_breaks import breaks

Run = Callable[..., list[Any]]
LEFT_OUT = "`torch.compiler.disable()`d function"
OF_PLAIT = "function <function _alone.<locals>.forward"
ONE_GRAPH = [
    pytest.param("dp2:zero3 mb2 remat:full", "gpt"),
    pytest.param("pp2:1f1b mb2", "gpt"),
    *(
        pytest.param(plan, family, marks=pytest.mark.long)
        for plan, family in [
            ("dp2", "llama"),
            ("dp2:ring", "gpt"),
            ("dp2:zero1", "llama"),
            ("dp2:zero2 mb2", "gpt"),
            ("dp2 remat:selective", "llama"),
            ("pp2:gpipe dp2:zero1 mb2", "gpt"),
        ]
    ),
]
SEVERAL = [
    pytest.param("tp2", "split-gpt", 4),
    *(
        pytest.param(plan, family, count, marks=pytest.mark.long)
        for plan, family, count in [
            ("tp2:1d,sp", "split-gpt", 4),
            ("tp4:2d", "split-gpt", 6),
            ("pp2:zb-h1 mb2", "gpt", 4),
            ("cp2:ring", "long-gpt", 2),
            ("cp2:ulysses", "long-gpt", 2),
            ("dp2 ep2", "mixtral-plain", 1),
            ("dp2", "split-gpt-dropout", 4),
        ]
    ),
]


def small(name: str) -> Family:
    """Two blocks: the second one takes the graphs of the first."""
    family = family_of(name)
    return replace(family, keys={**family.keys, "num_hidden_layers": 2}, num_steps=1)


def of_ranks(run: Run, plan: str, family: str) -> list[tuple[int, Counter[str]]]:
    """What each rank of the plan finds."""
    size = Plan.parse(plan).world_size
    return run(size, breaks, f"{plan} compile", small(family), plan=plan)


@pytest.mark.parametrize(("plan", "family"), ONE_GRAPH)
def test_a_block_is_one_graph(ranks: Run, plan: str, family: str) -> None:
    for num_graphs, reasons in of_ranks(ranks, plan, family):
        assert not reasons
        assert num_graphs >= 1


@pytest.mark.parametrize(("plan", "family", "count"), SEVERAL)
def test_graphs_end_at_layers_that_are_left_out_and_nowhere_else(
    ranks: Run, plan: str, family: str, count: int
) -> None:
    """`count`: all breaks of a process, which two blocks share."""
    for _, reasons in of_ranks(ranks, plan, family):
        assert all(LEFT_OUT in reason and OF_PLAIT in reason for reason in reasons), reasons
        assert reasons.total() == count


@pytest.mark.parametrize(("dropout", "is_one"), [(0.0, True), (0.5, False)])
def test_adapters_stay_in_the_graph_of_their_block_unless_they_draw(
    ranks: Run, dropout: float, is_one: bool
) -> None:
    settings = AdapterSettings(rank=2, dropout=dropout)
    text = "dp1 compile precision:float64"
    ((_, reasons),) = ranks(1, breaks, text, small("llama"), settings, plan=text)
    assert (not reasons) is is_one, reasons
