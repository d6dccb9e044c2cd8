"""Choosing: the best of all, within memory, and what is said when nothing fits."""

import pytest

import plait
from plait.errors import ConfigError, PlaitError, PlanError
from plait.plan import PipelineAxis, Plan
from plait.plan.axes import REMATS
from plait.predict.cost import rough
from plait.predict.cost.api import described, machine
from plait.predict.cost.frameworks import PLAIT
from plait.predict.cost.records import Job
from plait.predict.cost.step import estimate_job
from plait.predict.planner import NothingFits
from plait.predict.planner.choose import decide
from plait.predict.planner.explain import explain, explain_plan
from plait.predict.planner.pareto import pareto_front
from plait.predict.planner.space import data_axes, degrees, divisors, micro_batch_counts, schedules
from tests.unit.predict.cost.shapes import GPT, GPT3, LLAMA_8B, MIXTRAL, config


def test_plans_are_best_first_fit_and_use_every_device():
    plans = plait.choose(config(LLAMA_8B, seq_len=4096), cluster="h100x16")
    assert [p.step_seconds for p in plans] == sorted(p.step_seconds for p in plans)
    assert all(p.fits and p.plan.world_size == 16 for p in plans)
    for one in plans:
        one.plan.check()


def test_nothing_in_the_space_beats_the_choice():
    asked = config({**GPT, "num_hidden_layers": 4}, seq_len=512, global_batch=8)
    best = plait.choose(asked, cluster="l40sx4")[0]
    where = machine("l40sx4")
    job = Job(described(asked), 8)
    every = []
    for one in degrees(job.model, 4, 8, 8):
        for count in micro_batch_counts(8, one.dp, one.pp):
            pipelines = [PipelineAxis(one.pp)] + (
                list(schedules(job.model, one.pp, count)) if one.pp > 1 else []
            )
            for pipeline in pipelines:
                for data in data_axes(one.dp, one.cp.size, PLAIT.data, 8, offloads=True):
                    for remat in REMATS:
                        plan = Plan(data, one.tp, pipeline, one.ep, one.cp, count, remat, "bf16")
                        try:
                            every.append(estimate_job(job, plan, where))
                        except PlanError:
                            continue
    fitting = [estimate for estimate in every if estimate.fits]
    assert len(fitting) > 50
    assert best.step_seconds <= min(estimate.step_seconds for estimate in fitting) * 1.02


def test_a_large_model_on_few_samples_is_given_what_an_engineer_would_try():
    """175 B parameters, 64 samples, 128 devices: tensor parallel in a node, a pipeline across, data
    parallel for the rest.
    """
    asked = config(GPT3, global_batch=64)
    best = plait.choose(asked, cluster="h100x128")[0]
    for text in (
        "tp8:1d,sp pp8 dp2:zero1 mb32",
        "tp8:1d,sp pp16:interleaved,v3 mb64",
        "tp4:1d,sp pp16:zbv dp2:zero1 mb32",
    ):
        for remat in ("none", "full"):
            tried = plait.estimate(asked, f"{text} remat:{remat} precision:bf16", "h100x128")
            assert not tried.fits or best.step_seconds <= tried.step_seconds * 1.01


def test_a_model_that_fits_nowhere_says_by_how_much_and_from_where_on():
    with pytest.raises(
        NothingFits,
        match=r"the nearest needs [\d.]+ times the memory of rtx4090; fits from \d+ devices",
    ) as caught:
        plait.choose(config(MIXTRAL), cluster="rtx4090x4")
    assert caught.value.exit_code == 1
    size = int(str(caught.value).split("fits from ")[1].split()[0])
    assert plait.choose(config(MIXTRAL, global_batch=max(64, size)), cluster=f"rtx4090x{size}")


def test_a_sequence_that_fits_nowhere_is_refused_soon(monkeypatch):
    """Where activations alone are too large, the states of a plan are not computed."""
    real = rough.rank_state
    counted = []

    def counting(*given):
        counted.append(None)
        assert len(counted) < 4000  # the search itself has about 3,000
        return real(*given)

    monkeypatch.setattr(rough, "rank_state", counting)
    with pytest.raises(NothingFits, match="no number of devices up to 1048576 fits it"):
        plait.choose(config(LLAMA_8B, seq_len=10**9, global_batch=4), cluster="h100x8")


def test_objectives():
    asked = config(LLAMA_8B, seq_len=4096, global_batch=32)
    by_time, by_memory, by_cost = (
        plait.choose(asked, "h100x16", objective=word)[0] for word in ("time", "memory", "cost")
    )
    assert by_memory.memory.total <= by_time.memory.total
    assert by_cost.cost_per_million_tokens <= by_time.cost_per_million_tokens
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        plait.choose(asked, "h100x16", objective="memry")


def test_experts_and_long_sequences_open_their_axes():
    assert any(one.ep > 1 for one in degrees(described(config(MIXTRAL)), 16, 64, 8))
    assert any(
        one.cp.size > 1 for one in degrees(described(config(LLAMA_8B, seq_len=32768)), 16, 64, 8)
    )
    assert not any(
        one.cp.size > 1 for one in degrees(described(config(LLAMA_8B, seq_len=1024)), 16, 64, 8)
    )


def test_an_explanation_names_causes_and_plans():
    choice = decide(config(LLAMA_8B, seq_len=4096), "h100x16")
    lines = explain(choice)
    assert lines and any(" loses " in line and "%" in line for line in lines)
    named = explain_plan(choice, Plan.parse("tp8 dp2 mb8 remat:full precision:bf16"))
    assert named.startswith("tp8 dp2") and "loses" in named


def test_the_front_is_what_no_plan_beats():
    plans = plait.choose(config(LLAMA_8B, seq_len=4096), "h100x16")
    front = pareto_front(plans)
    assert front[0].step_seconds == plans[0].step_seconds
    memory = [one.memory.total for one in front]
    assert memory == sorted(memory, reverse=True)


def test_the_config_fixes_precision_and_compiling():
    asked = {**config(GPT, seq_len=512), "plan": {"text": "dp1 precision:float32 compile"}}
    plan = plait.choose(asked, "h100x8")[0].plan
    assert plan.precision == "float32" and plan.compile


def test_divisors():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_fewer_devices_where_all_cannot_be_used():
    plans = plait.choose(config(GPT, seq_len=512, global_batch=4), "h100x13")
    assert plans and plans[0].plan.world_size < 13


def test_runnable_plans_are_what_this_version_runs():
    from plait.plan import check_runnable

    for one in plait.choose(config(GPT, seq_len=512), "h100x4", runnable=True):
        check_runnable(one.plan)


@pytest.mark.parametrize(("cluster", "data_ranks"), [("a100-80gbx8", 8), ("h100x64", 8)])
def test_torchtitan_is_offered_data_axes(cluster: str, data_ranks: int) -> None:
    best = plait.choose(config(GPT, seq_len=1024), cluster, framework="torchtitan")
    assert best[0].plan.dp.size >= data_ranks
    for one in best:  # its DDP goes with no other axis
        plan = one.plan
        assert plan.dp.strategy in ("allreduce", "zero3")
        if plan.dp.strategy == "allreduce" and plan.dp.size > 1:
            assert plan.dp.size == plan.world_size


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"risk": "0.05"}, "risk is a probability, as 0.05, not '0.05'"),
        ({"risk": [0.05]}, "risk is a probability"),
        ({"top": "3"}, "top is a whole number, as 10, not '3'"),
        ({"top": 1.5}, "top is a whole number"),
        ({"objective": None}, "objective None is unknown; known: cost, memory, time"),
        ({"framework": 3}, "framework is a name, as 'plait', not 3"),
        ({"fix": 3}, "fix is text such as 'tp8 1f1b', not 3"),
    ],
)
def test_a_wish_of_another_type_is_told_with_its_cure(wrong, said):
    with pytest.raises(PlaitError, match=said):
        plait.choose(config(GPT), "h100x8", **wrong)
