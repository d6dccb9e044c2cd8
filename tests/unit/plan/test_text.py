"""Plan text: `parse` and `str` are inverses, and a text that cannot be read is answered term by
term.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import ContextAxis, DataAxis, PipelineAxis, Plan, TensorAxis
from plait.plan import axes as words
from plait.plan.facts import strategies_with

patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no failure

CANONICAL = {
    "dp2:zero3": "dp2:zero3",
    "pp4:1f1b mb8": "pp4 mb8",
    "tp4:2d dp2": "tp4:2d dp2",
    "pp2:zb-h1 tp2:1d,sp dp2:zero1 mb8": "pp2:zb-h1 tp2:1d,sp dp2:zero1 mb8",
    "tp8:1d,sp pp8:interleaved,v2 dp4:zero1 mb64 remat:selective precision:bf16": (
        "pp8:interleaved,v2 tp8:1d,sp dp4:zero1 mb64 remat:selective precision:bf16"
    ),
    "": "dp1",
    "dp1": "dp1",
    "dp1:allreduce pp1 tp1 ep1 cp1 mb1 remat:none precision:float32": "dp1",
    "dp2:allreduce": "dp2",
    "tp2:1d": "tp2",
    "tp2:sp": "tp2:1d,sp",
    "cp2:ring": "cp2",
    "cp2:ulysses ep2 dp2": "dp2 ep2 cp2:ulysses",
    "dp1:zero3": "dp1:zero3",
    "pp4 mb4": "pp4",
    "pp1 mb1": "dp1",
    "mb4": "mb4",
    "pp2:interleaved": "pp2:interleaved,v2",
    "pp2:zbv": "pp2:zbv",
    "tp4:2.5d": "tp4:2.5d",
    "tp8:2.5d,depth2": "tp8:2.5d,depth2",
    "tp4:depth1,2.5d": "tp4:2.5d",
    "dp8:zero2,offload,replicate2": "dp8:zero2,replicate2,offload",
    "dp2:async-server,stale0": "dp2:async-server,stale0",
    "dp2:local,every8": "dp2:local,every8",
    "compile dp02": "dp2 compile",
    "precision:float64\tremat:full \n compile": "remat:full precision:float64 compile",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_str_is_canonical(text: str, canonical: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == canonical
    assert Plan.parse(canonical) == plan


def test_every_word_of_the_grammar_reads() -> None:
    for strategy in words.DATA_STRATEGIES:
        option = {"async-server": ",stale3", "local": ",every5"}.get(strategy, "")
        assert Plan.parse(f"dp2:{strategy}{option}").dp.strategy == strategy
    for mode in words.TENSOR_MODES:
        assert Plan.parse(f"tp64:{mode}").tp.mode == mode
    for schedule in words.PIPELINE_SCHEDULES:
        assert Plan.parse(f"pp4:{schedule}").pp.schedule == schedule
    assert len(words.PIPELINE_SCHEDULES) == 12 and len(words.DATA_STRATEGIES) == 8


def test_defaults_are_resolved() -> None:
    assert Plan.parse("pp4").micro_batches == 4
    assert Plan.parse("dp4").micro_batches == 1
    assert Plan(pp=PipelineAxis(3)).micro_batches == 3
    assert Plan.parse("pp2:interleaved").pp.virtual == 2
    assert [
        PipelineAxis(2, s).virtual for s in ("zbv", "v-half", "v-min", "dualpipev", "1f1b")
    ] == [2, 2, 2, 2, 1]
    assert Plan.parse("tp4:2.5d").tp.depth == 1
    assert Plan() == Plan.parse("dp1") and Plan().pp.virtual == 1


def test_sizes() -> None:
    plan = Plan.parse("pp2:interleaved,v3 tp8:2.5d,depth2 dp6:zero3,replicate2 cp2 ep4")
    assert plan.world_size == 2 * 8 * 6 * 2
    assert (plan.tp.q, plan.dp.shard, plan.pp.num_stages) == (2, 3, 6)
    assert [TensorAxis(64, mode).q for mode in ("1d", "2d", "3d")] == [64, 8, 4]


# (text, what the message must say)
BAD = [
    (
        "dp2:zreo3",
        "plan 'dp2:zreo3': unknown strategy or option 'zreo3' of dp; did you mean 'zero3'?",
    ),
    ("tp4:2dd", "plan 'tp4:2dd': unknown mode or option '2dd' of tp; did you mean '2d'?"),
    ("pp4:1f1f", "did you mean '1f1b'?"),
    ("pp4:zb", "of pp; did you mean 'zbv'?"),
    ("cp2:rin", "did you mean 'ring'?"),
    ("compiles", "plan 'compiles': unknown term; did you mean 'compile'?"),
    ("zero3", "zero3 is a strategy of dp; write dp2:zero3"),
    ("gpipe", "gpipe is a schedule of pp; write pp2:gpipe"),
    ("bf16", "write precision:bf16"),
    ("DP2", "terms are lower case; did you mean 'dp2'?"),
    ("auto", "'auto' asks the planner"),
    ("quux", "known: compile, cp, dp, ep, mb, pp, precision, remat, tp"),
    ("dp", "plan 'dp': dp needs a number, as in dp2"),
    ("dp:zero3", "dp needs a number, as in dp2"),
    ("mb", "mb needs a number, as in mb2"),
    ("dp0", "dp0 is too small; the least is dp1"),
    ("mb0", "mb0 is too small; the least is mb1"),
    ("ep0", "ep0 is too small; the least is ep1"),
    ("dp2:local,every0", "every0 is too small; the least is every1"),
    ("dp2:zero1,replicate0", "replicate0 is too small"),
    ("dp-2", "this is no term; did you mean 'dp'?"),
    ("dp=2", "did you mean 'dp'? It stands with its number, as in dp2"),
    ("quux", "a plan is text such as 'dp2:zero3 tp2 mb4'"),
    ("fsdp2", "unknown term; fsdp of other libraries is written dp2:zero3"),
    ("ddp", "ddp of other libraries is written dp2"),
    ("dp2 fp16", "fp16 of other libraries is written precision:bf16"),
    ("dp2 dp2", "plan 'dp2 dp2': dp2: dp is given twice, dp2 and dp2; keep one"),
    ("remat:full remat:none", "remat is given twice, remat:full and remat:none; keep one"),
    ("compile compile", "compile is given twice"),
    ("dp2:zero1,zero2", "dp has one strategy, and 'zero2' is a second"),
    ("pp2:interleaved,v2,v4", "pp has one virtual, and 'v4' is a second"),
    ("dp2:", "a strategy or an option is missing beside a colon or comma"),
    ("dp2:zero1,,offload", "a strategy or an option is missing"),
    ("dp2,tp2", "'tp2' is a term of its own; separate terms by blanks"),
    ("dp2:sp", "unknown strategy or option 'sp' of dp"),
    ("dp2:zero1,offload3", "offload takes no number; write offload"),
    ("pp2:interleaved,v", "v needs a number, as in v2"),
    ("dp2:async-server,stale", "stale needs a number, as in stale2"),
    (
        "dp2:async-server",
        "async-server needs staleK, the most updates that a worker may lag behind (0 or more)",
    ),
    ("dp2:async-server", "write for example dp2:async-server,stale2"),
    (
        "dp2:local",
        "local needs everyH, the steps between two averagings (1 or more); write for example "
        "dp2:local,every8",
    ),
    (
        "dp2:zero1,stale3",
        "stale3 belongs to async-server; write dp2:async-server,stale3 or leave it out",
    ),
    ("dp2:ring,every3", "every3 belongs to local; write dp2:local,every3 or leave it out"),
    (
        "dp4:ring,replicate2",
        "replicate2 belongs to zero1, zero2 and zero3, because ring replicates everything",
    ),
    (
        "dp2:allreduce,offload",
        "offload belongs to zero1, zero2 and zero3; write dp2:zero1,offload or leave it out",
    ),
    ("tp4:2d,sp", "sp belongs to 1d, because 2d shards these activations already; write tp4:2d"),
    ("tp8:3d,depth2", "depth2 belongs to 2.5d; write tp8:2.5d,depth2 or leave it out"),
    (
        "pp4:gpipe,v2",
        "v2 belongs to interleaved, because gpipe always has 1 to a rank; write "
        "pp4:interleaved,v2 or pp4:gpipe",
    ),
    (
        "pp4:zbv,v3",
        "v3 belongs to interleaved, because zbv always has 2 to a rank; write pp4:interleaved,v3 "
        "or pp4:zbv",
    ),
    ("ep2:ring", "ep has no options; write ep2"),
    ("mb4,v2", "mb has no options; write mb4"),
    ("compile3", "compile stands alone; write compile"),
    ("compile:full", "compile stands alone; write compile"),
    ("remat", "remat needs one word after a colon, remat:none|selective|full|auto"),
    ("remat:fulll", "unknown remat 'fulll'; did you mean 'full'?"),
    ("precision:fp16", "unknown precision 'fp16'; fp16 of other libraries is written"),
    ("precision:bfloat16", "bfloat16 of other libraries is written precision:bf16"),
    ("precision:float16", "float16 of other libraries is written precision:bf16"),
    ("dp2 bfloat16", "bfloat16 of other libraries is written precision:bf16"),
    ("precision:fp32", "fp32 of other libraries is written precision:float32"),
    ("precision:BF16", "words are lower case: write precision:bf16"),
    ("dp2:fsdp", "fsdp of other libraries is written dpN:zero3"),
    ("dp2:ddp", "ddp of other libraries is written dpN"),
    ("dp2:FULL_SHARD", "FULL_SHARD of other libraries is written dpN:zero3"),
    ("dp2:ZeRO3", "words are lower case: write zero3"),
    ("dp2:Zero3,offlaod", "words are lower case: write zero3"),
    ("pp2:GPipe", "words are lower case: write gpipe"),
    ("dp99999999999", "dp has a number of 11 digits; the largest that is read has 9"),
    ("ép2", "this is no term"),
    ("dp٢", "this is no term"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_terms_are_named(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"plan '{text}'")


def test_all_bad_terms_are_reported_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("dp2:zreo3 tp0 mb4 pq5 remat")
    lines = str(caught.value).splitlines()
    assert lines[0] == "plan 'dp2:zreo3 tp0 mb4 pq5 remat' has 4 faults:"
    assert [line.strip().split(": ")[0] for line in lines[1:]] == [
        "dp2:zreo3",
        "tp0",
        "pq5",
        "remat",
    ]


@pytest.mark.parametrize("thing", [None, 3, ["dp2"], b"dp2"])
def test_a_plan_is_text(thing: Any) -> None:
    with pytest.raises(PlanError, match="a plan is text such as 'dp2:zero3', not "):
        Plan.parse(thing)


def data_axes() -> st.SearchStrategy[DataAxis]:
    sizes = st.integers(1, 999)
    return st.one_of(
        st.builds(DataAxis, sizes, st.sampled_from(["allreduce", "ring", "server"])),
        st.builds(DataAxis, sizes, st.just("async-server"), stale=st.integers(0, 9)),
        st.builds(DataAxis, sizes, st.just("local"), every=st.integers(1, 500)),
        st.builds(
            DataAxis,
            sizes,
            st.sampled_from(strategies_with("replicate")),
            replicate=st.integers(1, 8),
            offload=st.booleans(),
        ),
    )


def tensor_axes() -> st.SearchStrategy[TensorAxis]:
    sizes = st.integers(1, 999)
    return st.one_of(
        st.builds(TensorAxis, sizes, st.sampled_from(["2d", "3d"])),
        st.builds(TensorAxis, sizes, sequence_parallel=st.booleans()),
        st.builds(TensorAxis, sizes, st.just("2.5d"), depth=st.integers(1, 9)),
    )


def pipeline_axes() -> st.SearchStrategy[PipelineAxis]:
    sizes = st.integers(1, 999)
    return st.one_of(
        st.builds(PipelineAxis, sizes, st.sampled_from(words.PIPELINE_SCHEDULES)),
        st.builds(PipelineAxis, sizes, st.just("interleaved"), st.integers(1, 9)),
    )


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        dp=data_axes(),
        tp=tensor_axes(),
        pp=pipeline_axes(),
        ep=st.integers(1, 64),
        cp=st.builds(ContextAxis, st.integers(1, 99), st.sampled_from(words.CONTEXT_STRATEGIES)),
        micro_batches=st.integers(0, 512),
        remat=st.sampled_from(words.REMAT_WORDS),
        precision=st.sampled_from(words.PRECISIONS),
        compile=st.booleans(),
    )


@patient
@given(plans())
def test_text_round_trips(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@patient
@given(plans(), plans())
def test_equal_texts_are_equal_plans(one: Plan, other: Plan) -> None:
    assert (str(one) == str(other)) == (one == other)


@patient
@given(plans(), st.randoms())
def test_the_order_of_terms_is_free(plan: Plan, random: Any) -> None:
    terms = str(plan).split()
    random.shuffle(terms)
    assert Plan.parse("  ".join(terms)) == plan


@patient
@given(st.text(alphabet="dptceimb0123:,.- vzro", max_size=24))
def test_any_text_parses_or_says_why(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except PlanError as error:
        assert str(error).startswith("plan '")
    else:
        assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", [f"dp{'9' * 5000}", "quux" * 2000, f"dp2:{'x' * 5000}"])
def test_a_long_text_is_not_repeated_whole(text: str) -> None:
    with pytest.raises(PlanError, match=rf"{len(text)} characters") as caught:
        Plan.parse(text)
    assert len(str(caught.value)) < 600
    with pytest.raises(PlanError) as caught:
        Plan.parse(f"{text} {text}x tp0")
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("word", words.TENSOR_MODES)
def test_a_word_without_its_axis_is_named_with_a_plan_that_can_be(word: str) -> None:
    """`tp2:2d` is no grid."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(word)
    written = str(refused.value).rpartition("; write ")[2]
    assert word in written
    Plan.parse(written).check()
