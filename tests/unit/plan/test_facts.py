"""One row a schedule and a data strategy: what the rules allow is what the generators make."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import pytest

from plait.errors import PlanError, ScheduleError
from plait.parallel import data
from plait.parallel.pipeline.actions import Kind
from plait.parallel.pipeline.schedules import SCHEDULES, check_shape, make
from plait.plan import DataAxis, PipelineAxis, Plan, facts
from plait.plan.axes import DATA_STRATEGIES, PIPELINE_SCHEDULES

SOURCE = Path(facts.__file__).parents[1]
SIZES = range(1, 9)


def test_every_word_has_a_row_and_every_row_its_code() -> None:
    assert tuple(facts.SCHEDULES) == PIPELINE_SCHEDULES == tuple(SCHEDULES)
    assert tuple(facts.STRATEGIES) == DATA_STRATEGIES
    together = [name for name, row in facts.STRATEGIES.items() if row.synchronous]
    assert together == list(data.STRATEGIES)


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_check_and_generator_agree(name: str) -> None:
    """Every number of ranks, stages a rank and micro-batches up to 8."""
    made = 0
    for p, v, m in product(SIZES, SIZES, SIZES):
        plan = Plan(pp=PipelineAxis(p, name, v), micro_batches=m)
        allowed = plan_is_sound(plan)
        try:
            check_shape(name, p, m, v)
            schedule = make(name, p, m, v)
        except ScheduleError:
            schedule = None
        assert allowed == (schedule is not None), plan
        made += allowed
        if schedule is not None:
            assert schedule.num_stages == plan.pp.num_stages
            assert schedule.asynchronous == facts.SCHEDULES[name].asynchronous
    assert made


def plan_is_sound(plan: Plan) -> bool:
    try:
        plan.check()
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_a_row_says_what_its_schedule_does(name: str) -> None:
    row = facts.SCHEDULES[name]
    schedule = make(name, 4, 8)
    kinds = {action.kind for action in schedule}
    assert row.splits_backward == (Kind.WEIGHT_GRAD in kinds)
    assert row.is_vee == (schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0))
    assert schedule.num_stages == 4 * row.default_virtual


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pp4:dualpipev mb4",
            "dualpipev on 4 ranks needs at least 8 micro-batches, got 4; write mb8",
        ),
        ("pp4:2bw mb2", "2bw on 4 ranks needs at least 4 micro-batches, got 2; write mb4"),
    ],
)
def test_too_few_micro_batches_are_refused_by_the_plan(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(text).check()


def test_interleaving_takes_any_number_of_micro_batches() -> None:
    plan = Plan.parse("pp4:interleaved,v2 mb2").check()
    assert make("interleaved", 4, plan.micro_batches, plan.pp.virtual).num_micro_batches == 2


@pytest.mark.parametrize("name", DATA_STRATEGIES)
def test_zero_stages_shard_one_thing_more_each(name: str) -> None:
    row = facts.STRATEGIES[name]
    shards = (row.shards_optimizer, row.shards_gradients, row.shards_parameters)
    assert sum(shards) == row.zero_stage
    assert shards == tuple(sorted(shards, reverse=True))
    assert row.elementwise == (name in data.ELEMENTWISE_ONLY)
    every, stale = (2 if name == "local" else None), (2 if name == "async-server" else None)
    plan = Plan(dp=DataAxis(4, name, stale, every))  # type: ignore[arg-type]
    assert plan.check().optimizer_shards == (4 if row.zero_stage else 1)


SCHEDULE_HOMES = {"plan/facts.py", "parallel/pipeline/schedules"}
STAGE_HOMES = {"plan/facts.py", "parallel/data/__init__.py"}


def words_in(path: Path, words: set[str]) -> set[str]:
    """The strings of a file that are exactly a word, docstrings left out."""
    text = path.read_text(encoding="utf-8")
    if not any(f'"{word}"' in text for word in words):
        return set()
    tree = ast.parse(text)
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize(
    ("words", "homes"),
    [
        (set(PIPELINE_SCHEDULES), SCHEDULE_HOMES),
        ({name for name, row in facts.STRATEGIES.items() if row.zero_stage}, STAGE_HOMES),
    ],
)
def test_facts_stand_in_two_places(words: set[str], homes: set[str]) -> None:
    found = {
        place: sorted(words & words_in(path, words))
        for path in SOURCE.rglob("*.py")
        if words & words_in(path, words)
        and not any((place := path.relative_to(SOURCE).as_posix()).startswith(h) for h in homes)
    }
    assert not found
