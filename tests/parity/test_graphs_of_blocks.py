"""Blocks that repeat share their graphs, and what the user has compiled stays one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.plan import Plan
from tests.parity.families import Family, family_of
from tests.parity.graph_breaks import breaks

Run = Callable[..., list[Any]]
PLANS = [
    pytest.param("dp2:zero3 mb2", "gpt"),
    *(
        pytest.param(plan, family, marks=pytest.mark.long)
        for plan, family in [
            ("dp2:zero3 remat:full", "llama"),
            ("pp2:1f1b dp2:zero3 mb2", "gpt"),
            ("tp2", "split-gpt"),
            ("cp2:ring", "long-gpt"),
            ("dp2 ep2", "mixtral-plain"),
            ("pp2:zb-h1 mb2", "gpt"),
        ]
    ),
]


def of_blocks(name: str, count: int) -> Family:
    """A family with as many blocks."""
    family = family_of(name)
    return replace(family, keys={**family.keys, "num_hidden_layers": count}, num_steps=1)


@pytest.mark.parametrize(("plan", "family"), PLANS)
def test_one_graph_serves_all_blocks(ranks: Run, plan: str, family: str) -> None:
    size = Plan.parse(plan).world_size
    few, many = (
        ranks(size, breaks, f"{plan} compile", of_blocks(family, count), plan=plan)
        for count in (2, 10)
    )
    assert [graphs for graphs, _ in many] == [graphs for graphs, _ in few]


def compiled_by_the_user(world: World, plan: str) -> tuple[int, int, list[str]]:
    """Graphs, breaks and warnings of a step of a model that torch.compile was given before."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model: Any = torch.compile(nn.Sequential(*layers), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = plait.build(
            model,
            plan,
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        engine.step((torch.ones(4, 8), torch.zeros(4, 8)), trace=False)
    told = [str(one.message) for one in caught if "compiled by" in str(one.message)]
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), told


@pytest.mark.parametrize("plan", ["dp1", "dp1:zero2", "dp1 remat:full"])
def test_a_model_that_the_user_has_compiled_is_one_graph(ranks: Run, plan: str) -> None:
    ((graphs, breaks_of_step, told),) = ranks(1, compiled_by_the_user, plan, plan=plan)
    assert (graphs, breaks_of_step, told) == (1, 0, [])


@pytest.mark.parametrize("plan", ["tp2", "dp2:zero3"])
def test_graphs_that_end_at_each_layer_are_told(ranks: Run, plan: str) -> None:
    for _, _, told in ranks(2, compiled_by_the_user, plan, plan=plan):
        assert len(told) == 1
        assert f"'{plan} compile'" in told[0]


def names_of(model: nn.Module) -> list[str]:
    """The parameters of an engine of one rank, by their names."""
    engine = plait.build(
        model, "dp1", loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    return sorted(piece.name for piece in engine.local_parameters())


def test_a_compiled_model_has_its_own_names() -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    wanted = names_of(nn.Sequential(*layers))
    whole: Any = torch.compile(nn.Sequential(*layers), backend="eager")
    assert names_of(whole) == wanted
    apart: Any = [torch.compile(layer, backend="eager") for layer in layers]
    assert names_of(nn.Sequential(*apart)) == wanted
