"""Replays of schedules: exact against hand counts, and whole periods instead of many
micro-batches.
"""

from collections.abc import Sequence

import pytest

import plait
from plait.predict.cost.time import pipeline
from plait.predict.cost.time.closed import closed_seconds, rank_of_stage
from plait.predict.cost.time.pipeline import StageSeconds, live_micro_batches, pipeline_time
from tests.unit.predict.cost.shapes import LLAMA_8B, config

EVEN = [StageSeconds(1.0, 1.0, 1.0)] * 4
UNEVEN = [
    StageSeconds(1.0, 1.5, 1.0),
    StageSeconds(2.0, 2.0, 1.5),
    StageSeconds(1.0, 1.0, 1.0),
    StageSeconds(0.5, 3.0, 1.0),
]


def closed_form(
    name: str, num_ranks: int, micro_batches: int, stages: Sequence[StageSeconds]
) -> float:
    """The closed form of a step, from the costs of its stages as a replay takes them."""
    virtual = len(stages) // num_ranks
    busy = [0.0] * num_ranks
    for stage, rank in zip(stages, rank_of_stage(name, num_ranks, virtual), strict=True):
        busy[rank] += stage.total
    sizes = (num_ranks, virtual, micro_batches)
    return closed_seconds(name, sizes, max(busy), sum(busy), stages[0].send)


def replayed(
    name: str, num_ranks: int, micro_batches: int, stages: Sequence[StageSeconds]
) -> float:
    """The step of a replay."""
    return pipeline_time(name, num_ranks, micro_batches, stages).seconds


def test_1f1b_is_the_textbook_step():
    step = pipeline_time("1f1b", 4, 8, EVEN)
    assert step.seconds == pytest.approx((8 + 3) * 3)
    assert step.bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("stages", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_whole_periods_equal_the_full_replay(name, stages, monkeypatch):
    short = pipeline_time(name, 4, 45, stages)
    monkeypatch.setattr(pipeline, "_few", lambda ranks, count: count)
    full = pipeline_time(name, 4, 45, stages)
    assert short.seconds == pytest.approx(full.seconds, rel=0.01)
    assert short.busy == pytest.approx(full.busy)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_closed_forms_are_the_replay_where_stages_are_even(name):
    assert closed_form(name, 4, 8, EVEN) == pytest.approx(pipeline_time(name, 4, 8, EVEN).seconds)


def test_closed_forms_rank_the_zero_bubble_family_as_the_replay_does():
    chunks = [StageSeconds(0.5, 0.5, 0.5)] * 8

    def steps(time):
        return [
            time("1f1b", 4, 12, EVEN),
            time("zb-h1", 4, 12, EVEN),
            time("zbv", 4, 12, chunks),
        ]

    for one in (steps(replayed), steps(closed_form)):
        assert one[0] > one[1] > one[2] - 1e-9


def test_live_micro_batches_come_from_the_lists():
    assert live_micro_batches("1f1b", 4, 8, 1)[0] == (4, 3, 2, 1)
    assert live_micro_batches("gpipe", 4, 8, 1)[0] == (8, 8, 8, 8)
    assert live_micro_batches("1f1b", 4, 2, 1)[0] == (2, 2, 2, 1)


def test_sends_delay_the_neighbour_and_keep_no_rank_busy():
    slow = [StageSeconds(1.0, 1.0, 1.0, send=0.5)] * 4
    step = pipeline_time("1f1b", 4, 8, slow)
    assert step.seconds > 33
    assert step.busy == (24.0,) * 4


@pytest.mark.parametrize(
    ("name", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zbv", 2),
        ("v-half", 2),
        ("v-min", 2),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_closed_forms_are_near_the_replay_for_few_and_many_micro_batches(
    name: str, virtual: int, num_ranks: int
) -> None:
    """A guess that promised a pipeline without bubbles to a single micro-batch once hid every good
    plan of a search.
    """
    for micro_batches in (1, 2, 4, 8, 16, 32):
        if name == "interleaved" and micro_batches % num_ranks:
            continue
        stages = [StageSeconds(1 / virtual, 1 / virtual, 1 / virtual)] * (num_ranks * virtual)
        closed = closed_form(name, num_ranks, micro_batches, stages)
        assert closed == pytest.approx(
            pipeline_time(name, num_ranks, micro_batches, stages).seconds, rel=0.2
        )


def test_no_rank_works_longer_than_the_step():
    """Ranks of a long pipeline with uneven stages run ahead of each other at first only."""
    plan = "pp2:interleaved,v3 tp2:1d,sp dp1:zero1,offload cp2 mb128 remat:full precision:bf16"
    assert 0 <= plait.estimate(config(LLAMA_8B, 8192, 128), plan, "l4x8").bubble_fraction < 0.05
