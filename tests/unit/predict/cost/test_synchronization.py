"""What ranks lose when they meet: counted as the engine meets, and found again in steps that
contain it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import models
from plait.cluster import Cluster
from plait.cluster.cpu_profile import MEETINGS
from plait.parallel.context.ring_schedule import KEYS_PER_STEP, RingSchedule, Visibility
from plait.paths import Paths
from plait.plan import Plan
from plait.predict.cost.api import job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.step import work_seconds
from plait.predict.cost.time.gradients import num_tensors
from plait.predict.cost.time.processor import Processor
from plait.predict.cost.time.synchronization import meeting_seconds, ring_steps
from plait.predict.probe import meetings as probe_meetings
from plait.predict.probe.engine import StepSeconds
from tests.unit.predict.cost.test_processor import CONFIG, HOST, PROBE, seconds, seconds_of

MEASURED = {
    "call": (2, 4, 8),
    "grid": (4,),
    "visit": (2, 4, 8),
    "turn": (2,),
    "bucket": (2,),
    "unit": (2,),
    "hand": (2,),
}


def machine(**known: Any) -> Processor:
    engine = HOST["engine"] | {name: {} for name in MEETINGS} | known
    found = machine_of(Cluster.local({**PROBE, "host": {**HOST, "engine": engine}}))
    assert isinstance(found, Processor)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [8, 32, 64, 128, 256])
def test_a_ring_is_as_many_steps_as_the_engine_makes(size: int, length: int) -> None:
    schedules = [RingSchedule(group(rank, size, length), 1, Visibility()) for rank in range(size)]
    visits = (
        sum(1 + sum(len(stretch.blocks) for stretch in schedule.steps()) for schedule in schedules)
        / size
    )
    rounds = len(list(schedules[0].steps()))
    assert ring_steps(size, size * length, KEYS_PER_STEP) == pytest.approx(2 * visits + 2 + rounds)


def group(rank: int, size: int, length: int) -> Any:
    return SimpleNamespace(
        axis=SimpleNamespace(rank=rank, size=size, paths=Paths()),
        seq_len=size * length,
        length=length,
    )


def test_short_parts_of_a_ring_cost_fewer_steps() -> None:
    """Eight ranks of 16 tokens meet all others in one round; of 128 tokens, in seven."""
    assert ring_steps(8, 128, KEYS_PER_STEP) < 0.5 * ring_steps(8, 1024, KEYS_PER_STEP)


@pytest.mark.parametrize(
    ("size", "ranks", "spent"),
    [(2, 2, 1e-4), (2, 4, 2e-4), (4, 4, 2e-4), (2, 6, 2.5e-4), (4, 8, 3e-4), (16, 16, 5e-4)],
)
def test_ranks_that_share_cores_lose_more_the_more_they_are(
    size: int, ranks: int, spent: float
) -> None:
    known = machine(call={"2": 1e-4, "4": 2e-4, "8": 3e-4}, grid={"4": 4e-4})
    assert meeting_seconds(known, "call", size, ranks) == pytest.approx(spent)
    assert meeting_seconds(known, "grid", size, ranks) == pytest.approx(
        2 * spent
    )  # what was measured once grows alike
    assert meeting_seconds(known, "visit", size, ranks) == 0


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_parameter_of_a_block_is_counted(name: str) -> None:
    keys = {key: value for key, value in CONFIG["model"].items() if key != "name"}
    keys |= {"intermediate_size": 256, "max_position_embeddings": 128}
    with torch.device("meta"):
        model = models.make(name, **keys)
    plan = Plan.parse("dp1")
    described = job_of(config_tables({**CONFIG, "model": {"name": name, **keys}}), plan).model
    assert sum(count * num_tensors(block) for block, count in described.runs) == len(
        list(model.parameters())
    )


def test_what_meetings_cost_is_found_again_in_the_work_of_plans() -> None:
    """Steps that were made of known losses give those losses, whatever else they contain."""
    put_in = {
        name: {str(size): 1e-4 * (1 + index + size / 4) for size in sizes}
        for index, (name, sizes) in enumerate(MEASURED.items())
    }
    whole = machine(**put_in)
    plans = [text for plans in probe_meetings.PLANS.values() for text in plans]
    ranks = {text: Plan.parse(text).world_size for text in plans}
    works = {text: [work(text, whole) / ranks[text]] * ranks[text] for text in plans}
    found = probe_meetings.losses(works, machine())
    assert found == {name: pytest.approx(by_ranks) for name, by_ranks in put_in.items()}


@pytest.mark.parametrize(
    ("times", "found"), [(1.1, 1.1), (0.9, 1.0), (9.0, probe_meetings.MOST_STRETCH)]
)
def test_a_step_that_takes_longer_than_its_parts_stretches_them(times: float, found: float) -> None:
    parts = work(probe_meetings.ALONE, machine())
    assert probe_meetings.stretch([times * parts] * 3, machine()) == pytest.approx(found)
    longer = machine(stretch=1.1)
    assert (
        1.05 * parts < work(probe_meetings.ALONE, longer) < 1.1 * parts
    )  # the update is no part of a block


def test_ranks_that_share_cores_leave_them_idle_at_times() -> None:
    crowded = [StepSeconds(1.0, 2.2)] * 4  # four seconds of work on two cores
    assert probe_meetings.idle(
        {"tp2": [StepSeconds(1.0, 1.5)] * 2, "tp4": crowded}, 2
    ) == pytest.approx(1.1)
    assert probe_meetings.idle({"tp2": [StepSeconds(1.0, 1.5)] * 2}, 2) == 1.0
    engine = HOST["engine"] | {"idle": 1.1}
    assert seconds("dp8", host={**HOST, "engine": engine}) == pytest.approx(1.1 * seconds("dp8"))
    assert seconds("dp2", host={**HOST, "engine": engine}) == seconds("dp2")


def work(text: str, known: Processor) -> float:
    plan = Plan.parse(text)
    return work_seconds(job_of(probe_meetings._config(), plan), plan, known)


def test_plans_are_measured_among_as_many_ranks_as_they_have() -> None:
    assert {size for sizes in MEASURED.values() for size in sizes} == {2, 4, 8}
    counted = {
        name: tuple(Plan.parse(text).world_size for text in plans)
        for name, plans in probe_meetings.PLANS.items()
    }
    assert counted == MEASURED
    assert sum(len(probe_meetings.plans_of(size)) for size in (2, 4, 8)) == sum(
        map(len, MEASURED.values())
    )


def test_buckets_steps_of_a_ring_and_handing_over_take_time() -> None:
    slow = {
        **HOST,
        "links": {n: {op: [1e-2, 4e9] for op in ops} for n, ops in HOST["links"].items()},
    }
    assert seconds("dp2", host=slow) - seconds("dp2") > 5e-2  # six buckets
    assert seconds("dp4:ring", host=slow) > 3 * seconds("dp4", host=slow)  # six messages for each
    dear = {**HOST, "engine": HOST["engine"] | {"hand": {"2": 1e-2}}}
    assert seconds("pp2:gpipe mb4", host=dear) - seconds("pp2:gpipe mb4") > 4e-2
    mlp = {
        "name": "mlp",
        "in_features": 16,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "out_features": 10,
    }
    assert seconds_of(mlp, "dp2:zero3 mb4") > seconds_of(mlp, "dp2 mb4")
