"""The parity table of pipelines: every synchronous schedule, ranks, micro-batches and families,
against one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.actions import Schedule, backward, forward, looped
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.text import dumps, loads
from plait.plan import Plan
from tests.helpers.rows import long_but
from tests.parity import families, harness
from tests.parity.families import DEEP
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if not family.facts.asynchronous]
USUAL = ("1f1b", "interleaved", "zb-h1", "zbv")


def is_short(schedule: str, family: str) -> bool:
    return schedule in USUAL if family == "gpt-deep" else schedule == "1f1b" and family == "resnet"


ROWS = [
    pytest.param(schedule, family, marks=[] if is_short(schedule, family) else [pytest.mark.long])
    for schedule in SYNCHRONOUS
    for family in DEEP
]


def run_engines(world: World, plans: list[str], family: str, num_samples: int) -> list[Any]:
    return [harness.run_engine(world, plan, family, num_samples, {}) for plan in plans]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(("schedule", "family"), ROWS)
def test_equals_one_device(ranks: Run, schedule: str, family: str, size: int) -> None:
    """One micro-batch, p, 2p and 7, each with 8 samples: 8 do not divide by 7 either."""
    least = {"interleaved": size, "dualpipev": 2 * size}.get(schedule, 1)
    plans = [
        f"pp{size}:{schedule} mb{m} precision:float64" for m in (1, size, 2 * size, 7) if m >= least
    ]
    results = ranks(size, run_engines, plans, family, 8, plan=plans[0])
    for index, plan in enumerate(plans):
        record = harness.reference(family, Plan.parse(plan), 8, {})
        outcome = harness.compare([rank[index] for rank in results], record)
        assert outcome.largest <= TOLERANCE, (plan, outcome)


@pytest.mark.parametrize(
    "plan",
    long_but(
        [
            "pp2 dp2 mb2",
            "pp2:1f1b dp2:zero3 mb3",
            "pp2:zb-h1 dp2:zero1 mb3",
            "pp2:zbv dp2:zero2 mb4",
        ],
        [
            "pp2 dp2 mb2",
            "pp2:gpipe dp2:ring mb3",
            "pp2:1f1b dp2:zero1 mb3",
            "pp2:interleaved,v2 dp2:zero1 mb2",
            "pp2:zb-h1 dp2:zero1 mb3",
            "pp2:zbv dp2:zero2 mb4",
            "pp2:1f1b dp2:zero2 mb3",
            "pp2:1f1b dp2:zero3 mb3",
            "pp2:zb-h1 dp2:zero3 mb3",
            "pp2:zbv dp2:zero3 mb3",
            "pp2:dualpipev dp2:zero3 mb4",
            "pp2:1f1b dp4:zero3,replicate2 mb2",
        ],
    ),
)
@pytest.mark.parametrize("family", ["gpt-deep", pytest.param("resnet", marks=pytest.mark.long)])
def test_composes_with_the_data_axis(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan", ["pp4:1f1b mb4", "pp2:zbv mb4", "pp2 dp2:zero1 mb2", "pp2:interleaved,v2 dp2:zero2 mb2"]
)
def test_clips_by_the_global_norm(ranks: Run, plan: str) -> None:
    """The tied embedding, on two stages, counts once in the norm."""
    outcome = check(ranks, f"{plan} precision:float64", "gpt-deep", clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("plan", ["pp2:1f1b mb3", "pp2:zbv mb3", "pp2:zb-h1 dp2:zero3 mb2"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "llama-deep")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    ("plan", "group", "family"),
    [
        ("pp2:zb-h1 mb7", 2, "gpt-deep"),
        ("pp2:zbv mb4", 9, "gpt-deep"),
        ("pp2:zb-h1 dp2:zero3 mb3", 2, "gpt-deep"),
        ("pp2:zbv mb4", 2, "resnet"),
    ],
)
def test_weight_gradients_of_several_micro_batches_at_once(
    ranks: Run, plan: str, group: int, family: str
) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, weight_grad_group=group)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("num_samples", long_but([5], [3, 5, 13]))
def test_batches_that_do_not_divide(ranks: Run, num_samples: int) -> None:
    outcome = check(ranks, "pp2:1f1b dp2:zero1 mb3 precision:float64", "gpt-deep", num_samples)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "cutting",
    [
        Cutting(counts=(1, 7, 1)),
        Cutting(counts=(1, 2, 1)),
        Cutting(splits=("blocks.1", "norm")),
        Cutting(measure=True, example=torch.zeros(2, 6, dtype=torch.int64), memory_bytes=1e9),
    ],
)
def test_cuts_where_it_is_told(ranks: Run, cutting: Cutting) -> None:
    """Also between embedding and position, with the head alone, and by blocks; where layers are
    measured, alike on every rank.
    """
    outcome = check(ranks, "pp3:1f1b mb3 precision:float64", "gpt-deep", cutting=cutting)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan", ["pp2:1f1b tp2 mb3", "pp2:1f1b tp2 dp2:zero1 mb8", "pp2:zbv tp2 mb2"]
)
@pytest.mark.parametrize("family", long_but(["split-llama"], ["split-gpt", "split-llama"]))
def test_composes_with_the_tensor_axis(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome


def breadth_first(p: int, m: int) -> Schedule:
    """A schedule that plait does not have: two stages a rank, each with all micro-batches at
    once.
    """
    ranks = []
    for rank in range(p):
        own = (rank, rank + p)
        passes = [forward(stage, j) for stage in own for j in range(m)]
        ranks.append((*passes, *(backward(stage, j) for stage in reversed(own) for j in range(m))))
    return Schedule("breadth-first", looped(p, 2), m, tuple(ranks))


def with_own_schedule(world: World, plan: str, text: str) -> tuple[list[str], Any]:
    """What is executed, and the engine's numbers."""
    options = Options(seed=harness.SEED, schedule=loads(text))
    engine = build(
        families.family_of("gpt-deep").model(),
        plan,
        loss=cross_entropy,
        optimizer=harness.optimizer,
        options=options,
        world=world,
    )
    inputs, targets = families.family_of("gpt-deep")._batch(8, torch.Generator().manual_seed(3))
    losses = [engine.step((inputs, targets)).loss for _ in range(3)]
    actions = engine._training_step.timing._actions
    return [str(action) for action in actions if action.kind.value in "FB"], losses


def test_a_user_s_own_schedule_from_text_trains_like_the_others(ranks: Run) -> None:
    mine = breadth_first(2, 4)
    plan = "pp2:1f1b mb4 precision:float64"
    found = ranks(2, with_own_schedule, plan, dumps(mine), plan=plan)
    assert [executed for executed, _ in found] == [
        [str(action) for action in actions] for actions in mine.ranks
    ]
    theirs = ranks(2, with_own_schedule, plan, dumps(make("1f1b", 2, 4)), plan=plan)
    assert found[0][1] == pytest.approx(theirs[0][1], rel=TOLERANCE)
