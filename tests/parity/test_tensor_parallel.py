"""The parity table of the tensor axis: every mode and family, alone and with the data axis, against
one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.comm import World
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.families import HUGGING_FACE, SPLIT_FAMILIES, family_of
from tests.parity.harness import (
    TOLERANCE,
    check,
    compare,
    make_engine,
    reference,
    train,
    whole_model,
)
from tests.parity.wide import MORE_SPLIT

Run = Callable[..., list[Any]]
MODES = [
    "tp2",
    "tp2:1d,sp",
    "tp4:1d,sp",
    "tp1:2d",
    "tp4:2d",
    "tp4:2.5d",
    "tp8:2.5d,depth2",
    "tp8:3d",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_equals_one_device(ranks: Run, family: str, mode: str) -> None:
    outcome = check(ranks, f"{mode} precision:float64", f"split-{family}")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    [
        "tp2 dp2:zero1 mb2", "tp2 dp2:zero3", "tp2:1d,sp dp2:zero3 mb2", "tp4:2d dp2:zero1",
        "tp4:2d dp2:zero3 mb2",
        "tp2 dp2:ring", "tp2:1d,sp dp2:server mb2", "tp4:2d dp2:ring mb2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["mlp", "gpt", "llama"])
def test_composes_with_the_data_axis(ranks: Run, family: str, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", f"split-{family}")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["tp2:1d,sp dp2:zero1", "tp4:2d dp2:zero3"])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_models_of_others_compose_too(ranks: Run, family: str, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", f"split-{family}")
    assert outcome.largest <= TOLERANCE, outcome


def as_threads(ranks: int, plan: str, family: str, num_samples: int) -> None:
    """The same engine and the same collectives, as threads of one process."""
    made = family_of(family)
    text = f"{plan} precision:float64"
    copies = [whole_model(made) for _ in range(ranks)]

    def rank(world: World) -> list[Any]:
        return train(make_engine(world, text, made, {}, copies[world.rank]), made, num_samples)

    outcome = compare(
        threaded(ranks, rank, plan=plan), reference(family, Plan.parse(text), num_samples, {})
    )
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["tp8:3d dp2:zero3 mb2", "tp8:2.5d,depth2 dp2:zero1", "tp8 dp2"])
@pytest.mark.parametrize("family", ["wide-mlp", "wide-gpt"])
def test_sixteen_ranks(family: str, plan: str) -> None:
    as_threads(16, plan, family, 16)


@pytest.mark.parametrize("plan", ["tp9:2d", "tp18:2.5d,depth2"])
@pytest.mark.parametrize("family", ["three-mlp", "three-gpt"])
def test_grids_of_three(family: str, plan: str) -> None:
    as_threads(Plan.parse(plan).world_size, plan, family, 18)


@pytest.mark.parametrize("plan", ["pp2 tp2 mb3", "pp2:zb-h1 tp2:1d,sp mb2", "pp2 tp4:2d mb2"])
def test_composes_with_pipelines(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "split-gpt")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan", ["tp2", "tp4:1d,sp", "tp4:2d dp2:zero2", "tp8:2.5d,depth2", "tp8:3d"]
)
def test_clips_by_the_global_norm(ranks: Run, plan: str) -> None:
    """What several ranks hold counts once."""
    outcome = check(ranks, f"{plan} precision:float64", "split-gpt", clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["tp4:2d", "tp8:2.5d,depth2 mb2", "tp8:3d", "tp4:2d dp2"])
@pytest.mark.parametrize("num_samples", [3, 5])
def test_batches_that_the_grid_does_not_divide(ranks: Run, plan: str, num_samples: int) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "split-llama", num_samples)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("plan", ["tp2:1d,sp mb2", "tp4:2d"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "split-llama")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan", ["tp2", "tp2:1d,sp mb2", "tp4:2d", "tp8:2.5d,depth2", "tp8:3d", "tp2 dp2:zero1"]
)
def test_dropout_is_that_of_one_device(ranks: Run, plan: str) -> None:
    """The mask of the whole tensor is drawn alike everywhere and cut: also that of attention's
    weights.
    """
    outcome = check(ranks, f"{plan} precision:float64", "split-gpt-dropout")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["tp2", "tp2:1d,sp", "tp4:2d dp2:zero3"])
@pytest.mark.parametrize("family", MORE_SPLIT)
def test_models_with_a_plan_of_their_own(ranks: Run, family: str, plan: str) -> None:
    """Roles from the config's own plan; windows, scaled embeddings, soft caps, norms of heads,
    fused projections.
    """
    outcome = check(ranks, f"{plan} precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome
