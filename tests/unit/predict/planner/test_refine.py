"""The planner's first choice against plans that a person writes by hand: none that fits is quicker
by more than 1 %.
"""

from __future__ import annotations

import random

import pytest

import plait
from plait.errors import PlaitError
from plait.plan import Plan, check_batch, check_config
from plait.predict.cost.api import job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.step import estimate_job
from plait.predict.planner.choose import decide
from plait.predict.planner.space import divisors
from tests.unit.predict.cost.shapes import LLAMA_8B, MIXTRAL, config

MLP = {
    "model": {
        "name": "mlp",
        "in_features": 1024,
        "hidden_size": 8192,
        "num_hidden_layers": 8,
        "out_features": 1000,
    }
}
JOBS = {
    "7b on a workstation": (config(LLAMA_8B, 4096, 16), "rtx4090x8"),
    "8b on a node": (config(LLAMA_8B, 8192, 32), "h100x8"),
    "8b on eight nodes": (config(LLAMA_8B, 8192, 128), "h100x64"),
    "experts": (config(MIXTRAL, 4096, 128), "h100x32"),
    "mlp": ({**MLP, "train": {"global_batch": 4096}}, "a100-80gbx8"),
}


def by_hand(rng, devices, batch, layers):
    """A plan as someone might try it."""
    tp = rng.choice([one for one in divisors(devices) if one <= 16])
    pp = rng.choice([one for one in divisors(devices // tp) if one <= layers])
    cp = rng.choice([1, 1, 2])
    dp = devices // (tp * pp * cp)
    if dp * tp * pp * cp != devices or dp > batch:
        return None
    schedule = rng.choice(
        [
            "1f1b",
            "zb-h1",
            "zb-h2",
            "zbv",
            "v-half",
            "dualpipev",
            f"interleaved,v{rng.randint(2, 8)}",
        ]
    )
    data = rng.choice(
        [
            "allreduce",
            "zero1",
            "zero2",
            "zero3",
            "zero1,offload",
            f"zero3,replicate{rng.choice(divisors(dp))}",
        ]
    )
    words = [
        f"tp{tp}:{rng.choice(['1d', '1d,sp'])}",
        f"pp{pp}:{schedule}" if pp > 1 else "",
        f"dp{dp}:{data}",
        f"cp{cp}",
    ]
    words += [f"ep{rng.choice(divisors(dp * cp))}", f"mb{rng.choice(divisors(batch // dp))}"]
    return " ".join(
        [*words, f"remat:{rng.choice(['none', 'none', 'selective', 'full'])}", "precision:bf16"]
    )


@pytest.mark.parametrize("name", JOBS)
def test_no_plan_by_hand_beats_the_first(name):
    asked, cluster = JOBS[name]
    best = decide(asked, cluster)
    job = best.job
    machine = best.machine
    rng = random.Random(name)
    batch = job.global_batch
    tried = 0
    for _ in range(1200):
        text = by_hand(rng, machine.num_devices, batch, job.model.num_repeated)
        try:
            plan = Plan.parse(text or "").check()
            check_batch(plan, batch)
            check_config(plan, job.model.sizes)
            other = estimate_job(job, plan, machine)
        except PlaitError:
            continue
        if other.fits and plan.world_size == machine.num_devices:
            tried += 1
            assert best.plans[0].step_seconds <= other.step_seconds * 1.01, str(plan)
    assert tried > 10


def test_offloading_is_a_last_resort_that_costs_time():
    asked = config(LLAMA_8B, 2048, 8)
    assert all("offload" in str(one.plan) for one in plait.choose(asked, "h100x1"))
    plain, moved = (
        plait.estimate(asked, f"dp8:zero1{word} precision:bf16", "h100x8")
        for word in ("", ",offload")
    )
    assert moved.step_seconds > plain.step_seconds + 0.2
    assert moved.memory.optimizer == 0 < plain.memory.optimizer and moved.host_overfull < 1
    assert not plait.choose(asked, "h100x8")[0].plan.dp.offload
    huge = {**LLAMA_8B, "num_hidden_layers": 900}
    assert (
        plait.estimate(
            config(huge, 128, 8), "dp8:zero3,offload remat:full precision:bf16", "h100x8"
        ).host_overfull
        > 1
    )


def test_a_processor_has_nowhere_to_offload_to(tmp_path):
    from tests.unit.predict.cost.test_processor import CONFIG, PROBE

    cluster = plait.Cluster.local(PROBE)
    plain, moved = (
        plait.estimate(CONFIG, f"dp2:zero1{word}", cluster) for word in ("", ",offload")
    )
    assert (
        moved.memory == plain.memory
        and moved.step_seconds == plain.step_seconds
        and "offload" in str(moved.plan)
    )


def test_every_choice_is_canonical_runs_and_uses_all_devices():
    asked = config(LLAMA_8B, 8192, 64)
    machines = plait.Cluster.parse("h100x16")
    for one in plait.choose(asked, "h100x16", runnable=True):
        plan = Plan.parse(str(one.plan)).check()
        assert str(plan) == str(one.plan) and plan.world_size == 16 and one.fits
        assert estimate_job(
            job_of(asked, plan), plan, machine_of(machines)
        ).step_seconds == pytest.approx(one.step_seconds)


def test_nothing_is_proposed_that_a_model_has_no_part_for():
    """Tiny samples: every plan takes as long, so any of them may come first."""
    source = {"model": {**MLP["model"], "hidden_size": 32}, "train": {"global_batch": 8}}
    choice = decide(source, "h100x8")
    plans = [one.plan for one in choice.plans]
    assert all(plan.ep == 1 and plan.cp.size == 1 for plan in plans), plans


def test_one_device_has_no_twins() -> None:
    """Shards of one rank are the whole: strategies differ in offload alone."""
    found = plait.choose(MLP, cluster="h100x1", top=20)
    assert len(found) > 1
    for one in found:
        data = one.plan.dp
        assert data.strategy == "allreduce" or data.offload, str(one.plan)
