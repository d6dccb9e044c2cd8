"""Parts of a plan that are decided before the search, and the record of a search."""

from __future__ import annotations

import math
import re

import pytest

import plait
from plait.errors import PlanError
from plait.predict.cost.api import described
from plait.predict.cost.bars import probability_below
from plait.predict.planner import NothingFits
from plait.predict.planner.fixed import Fixed
from plait.predict.planner.space import degrees
from plait.predict.planner.words import times
from tests.unit.predict.cost.shapes import GPT3, LLAMA_8B, config

ASKED = config(LLAMA_8B, seq_len=4096, global_batch=64)


@pytest.mark.parametrize(
    ("fix", "holds"),
    [
        ("tp8 1f1b", lambda plan: plan.tp.size == 8 and plan.pp.schedule == "1f1b" != plan.pp.size),
        ("zero3 mb2", lambda plan: plan.dp.strategy == "zero3" and plan.micro_batches == 2),
        ("pp4:gpipe", lambda plan: (plan.pp.size, plan.pp.schedule) == (4, "gpipe")),
        ("pp2:interleaved,v4", lambda plan: str(plan.pp) == "pp2:interleaved,v4"),
        ("remat:full dp4", lambda plan: plan.remat == "full" and plan.dp.size == 4),
        ("tp4:2d", lambda plan: plan.tp.mode == "2d"),
        ("dp2:allreduce precision:fp8", lambda plan: str(plan.dp) == "dp2"),
        ("dualpipev", lambda plan: plan.pp.schedule == "dualpipev" and plan.pp.size > 1),
        ("pp4:dualpipev", lambda plan: str(plan.pp) == "pp4:dualpipev"),
        ("2bw", lambda plan: plan.pp.schedule == "2bw" and plan.micro_batches >= plan.pp.size),
        ("local,every8", lambda plan: str(plan.dp).endswith(":local,every8")),
        ("async-server,stale2 pp2", lambda plan: plan.dp.stale == 2),
        ("cp8", lambda plan: plan.cp.size == 8),
    ],
)
def test_every_plan_is_as_decided(fix, holds) -> None:
    plans = plait.choose(ASKED, "h200x16", fix=fix)
    assert plans and all(holds(one.plan.check()) for one in plans)
    if "1f1b" in fix:
        assert all(one.plan.pp.size > 1 for one in plans)


def test_what_is_decided_is_never_better_than_what_is_chosen() -> None:
    free = plait.choose(ASKED, "h200x16", top=1)[0]
    bound = plait.choose(ASKED, "h200x16", top=1, fix="tp8 1f1b")[0]
    own = plait.choose(ASKED, "h200x16", top=1, fix=str(free.plan))[0]
    assert free.step_seconds <= bound.step_seconds
    assert own.step_seconds == pytest.approx(free.step_seconds)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ("ring", "is a word of dp and cp; write cp2:ring"),
        ("tp8 tp4", "tp4 says size 4, and 8 was said before"),
        ("1f1c", "did you mean '1f1b'"),
        ("tp8:1d,pp", "is a term of its own"),
        ("local", "local needs everyH, the steps between two averagings; .* local,every8"),
        ("dp8:async-server", "async-server needs staleK"),
        ("async-server", "async-server,stale2"),
        ("pp8:dualpipev mb8", "needs at least 16 micro-batches, got 8; write mb16"),
        ("dp8:zero1,replicate3", "replicate3 does not divide dp8"),
        ("offload", "it is an option, which needs its strategy; write zero1,offload"),
        ("replicate2", "write zero3,replicate2"),
        ("v2", "write interleaved,v2"),
        ("DP2", "plans are written in small letters; write dp2"),
        ("tp", "its size is missing; write tp2"),
        ("h100", "it decides nothing; known: .*; or a term of a plan, as tp8"),
    ],
)
def test_a_word_that_decides_nothing_is_refused(fix: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Fixed.parse(fix)


@pytest.mark.parametrize(
    "fix", ["zero1,offload", "zero3,replicate2", "interleaved,v2", "2.5d,depth2"]
)
def test_the_words_that_messages_tell_to_write_are_taken(fix: str) -> None:
    assert Fixed.parse(fix).values


def test_counts_below_those_of_a_schedule_are_left_out() -> None:
    plans = plait.choose(ASKED, "h200x8", fix="dualpipev mb8", top=100)
    assert {one.plan.pp.size for one in plans} == {2, 4}


def test_a_fixed_context_axis_may_leave_a_rank_few_tokens() -> None:
    short = config(LLAMA_8B, seq_len=2048, global_batch=64)
    assert all(one.plan.cp.size == 1 for one in plait.choose(short, "h200x8", fix="dp2 tp4"))
    assert plait.choose(short, "h200x8", fix="cp4")[0].plan.cp.size == 4


def test_a_fixed_tensor_axis_may_be_larger_than_two_nodes() -> None:
    model = described(config(GPT3))
    assert max(one.tp.size for one in degrees(model, 32, 64, 8)) == 16
    assert max(one.tp.size for one in degrees(model, 32, 64, 8, decided=["tp"])) == 32


def test_experts_of_a_model_without_them_are_refused() -> None:
    with pytest.raises(PlanError, match="has no experts; leave ep8 out") as refused:
        plait.choose(ASKED, "h200x8", fix="ep8")
    assert refused.value.exit_code == 2


def test_nothing_fits_names_what_was_decided() -> None:
    with pytest.raises(NothingFits, match="no plan with tp2 dp1"):
        plait.choose(config(GPT3, global_batch=8), "h100x2", fix="tp2 dp1")


@pytest.mark.parametrize(
    ("fix", "cluster", "message"),
    [
        ("tp8 1f1b", "h100x8", "takes pp2 x tp8 = 16 devices or more, and h100x8 has 8"),
        ("tp8 1f1b", "h100x4", "ask for h100x16, or fix less"),
        ("dp4:zero3 pp4", "h100x8", "takes pp4 x dp4 = 16 devices or more"),
        ("zero1 tp8", "h100x8", "takes dp2 x tp8 = 16 devices or more"),
    ],
)
def test_too_few_devices_for_what_was_decided_are_counted(
    fix: str, cluster: str, message: str
) -> None:
    with pytest.raises(NothingFits, match=re.escape(f"fix '{fix}'") + ".*" + re.escape(message)):
        plait.choose(ASKED, cluster, fix=fix)


@pytest.mark.parametrize(
    ("fix", "least"),
    [("", 1), ("zero3 cp2", 2), ("dp1:zero1 tp2", 2), ("2d mb4 remat:full", 1), ("ep8", 1)],
)
def test_the_fewest_devices_of_decisions(fix: str, least: int) -> None:
    assert math.prod(Fixed.parse(fix).least_sizes().values()) == least


def test_a_search_is_a_record() -> None:
    found = plait.search(ASKED, "h100x16", top=3)
    assert len(found.plans) == 3 and found.explanation
    assert found.pareto[0].plan == found.plans[0].plan
    counts = found.statistics
    assert counts.plans > counts.combinations > counts.not_opened >= 0
    assert set(found.as_dict()) == {"plans", "pareto", "explanation", "searched"}


@pytest.mark.parametrize("cluster", ["a100-80gbx64", "h100x16", "l40sx8"])
def test_the_first_plan_is_likelier_to_fit_than_not(cluster: str) -> None:
    first = plait.choose(ASKED, cluster, top=1)[0]
    assert first.fits and first.fits_probability >= 0.499


def test_without_a_likely_plan_the_one_that_is_predicted_to_fit_is_chosen() -> None:
    """A plan that fills its memory is found where nothing smaller is, and says how sure it is."""
    plain = plait.estimate(ASKED, "tp8:1d,sp pp2 remat:full mb64 precision:bf16", "l4x16")
    limit = plain.memory_limit
    assert plain.reach == "several nodes"
    assert probability_below(limit, 0.99 * limit, plain.reach) < 0.5


def test_a_factor_that_does_not_fit_is_above_one() -> None:
    assert [times(factor) for factor in (0.99, 1.0, 1.001, 1.234, 3.0, 250.0)] == [
        "1.01", "1.01", "1.01", "1.2", "3", "250",
    ]  # fmt: skip


def test_the_words_of_an_error_are_listed_once() -> None:
    with pytest.raises(PlanError) as refused:
        Fixed.parse("zz9")
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert len(known) == len(set(known)) > 10
