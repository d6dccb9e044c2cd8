"""Agents of torchrun on loopback addresses: one is killed whole, and stays away or returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.run.restarts import CAUSE
from tests.cli.command import CONFIG, plait, write_config
from tests.fault.agents import Agents
from tests.fault.kills import differences, largest_difference

TOLERANCE = 1e-10
STEPS = 60
SETTINGS = (
    f"train.steps={STEPS}",
    "train.global_batch=6",
    "train.checkpoint_every=2",
    "train.optimizer=sgd",
    "train.momentum=0.9",
    "train.linear_product=rule",
    "cluster.name=rtx4090x4",
)
Start = Callable[..., Agents]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the agents of a run, and ends what is left of them."""
    begun: list[Agents] = []

    def starting(count: int, replan: str, *settings: str, plan: str = "", **options: Any) -> Agents:
        name = plan or plan_of(count)
        words = ("--plan", name, "--set", *SETTINGS, f"recovery.replan={replan}")
        agents = Agents(tmp_path, *words, *settings, **options)
        begun.append(agents)
        agents.start(*range(1, count + 1))
        return agents

    yield starting
    for agents in begun:
        agents.end()


def plan_of(count: int) -> str:
    return f"dp{count} precision:float64"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run on so many ranks that nobody disturbs."""
    root = tmp_path_factory.mktemp("undisturbed")
    write_config(root, CONFIG)

    def trained(count: int, plan: str = "") -> Path:
        name = plan or plan_of(count)
        out = root / name.replace(" ", "-").replace(":", "-")
        if not out.exists():
            words = ("--plan", name, "--out", out, "--set", *SETTINGS)
            done = plait("train", "tiny.toml", *words, cwd=root)
            assert done.code == 0, done.err
        return out

    return trained


@pytest.mark.long
@pytest.mark.parametrize(("count", "seed"), [(2, 0), (3, 1)])
def test_an_agent_that_stays_away_leaves_a_run_under_a_new_plan(
    count: int, seed: int, start: Start, undisturbed: Callable[..., Path]
) -> None:
    chance = random.Random(seed)
    agents = start(count, "auto", nnodes=f"1:{count}")
    moment = chance.randrange(3, 8)
    agents.wait_for(lambda: agents.steps() >= moment)
    agents.kill(chance.randrange(1, count + 1))
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    assert recovery["cause"] == CAUSE
    assert recovery["plan_before"] == plan_of(count)
    assert recovery["plan_after"] == summary["plan"] != recovery["plan_before"]
    assert recovery["steps_repeated"] <= 2
    assert summary["steps"] == STEPS
    assert largest_difference(agents.run, undisturbed(1)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_an_agent_that_returns_takes_the_run_back_to_its_first_plan(
    seed: int, start: Start, undisturbed: Callable[..., Path]
) -> None:
    """Whoever is killed, the first rank's agent too. The signal of the agents is no preemption."""
    chance = random.Random(seed)
    agents = start(3, "auto")
    moment = chance.randrange(3, 8)
    agents.wait_for(lambda: agents.steps() >= moment)
    victim = {2: 1, 3: chance.randrange(2, 4)}[seed]
    agents.kill(victim)
    agents.wait_for(lambda: len(agents.restarts()) == 1)
    agents.start(victim)
    agents.wait_for(lambda: len(agents.restarts()) == 2)
    summary = agents.finish()
    away, back = summary["recoveries"]
    assert away["plan_before"] == back["plan_after"] == summary["plan"] == plan_of(3)
    assert away["plan_after"] == back["plan_before"] != plan_of(3)
    assert back["steps_repeated"] == 0
    assert summary["steps"] == STEPS
    assert largest_difference(agents.run, undisturbed(1)) < TOLERANCE


@pytest.mark.long
def test_an_agent_that_comes_as_the_run_ends_lets_it_end(start: Start) -> None:
    """One agent starts its ranks again, which have done their steps. The other sees nobody come.

    If the other's ranks ended well, it would wait for five minutes.
    """
    agents = start(2, "auto", nnodes="1:3", blind=1)
    agents.hurry()
    agents.wait_for(lambda: agents.steps() == STEPS)
    agents.start(3)
    agents.wait_for(lambda: "closing signal SIGTERM" in agents.said(2))
    agents.release()
    summary = agents.finish()
    assert (summary["steps"], summary["plan"]) == (STEPS, plan_of(2))


@pytest.mark.long
def test_agents_that_wait_for_the_lost_one_end_with_equal_bits(
    start: Start, undisturbed: Callable[..., Path]
) -> None:
    """All three are needed (`--nnodes 3`), so the run goes on when the third is back."""
    agents = start(3, "never", nnodes="3:3")
    agents.wait_for(lambda: agents.steps() >= 5)
    agents.kill(2)
    agents.start(2)
    agents.wait_for(lambda: len(agents.restarts()) == 1)
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    assert recovery["plan_before"] == recovery["plan_after"] == plan_of(3)
    assert recovery["steps_repeated"] <= 2
    assert not differences(agents.run, undisturbed(3))


SHARDED = "dp3:zero1 precision:float64"


@pytest.mark.long
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize(
    ("kill", "source"),
    [(Agents.kill, "replica"), (Agents.kill_rank, "snapshot")],
    ids=["agent", "rank"],
)
def test_a_machine_or_a_rank_is_lost_between_checkpoints(
    kill: Callable[[Agents, int], None],
    source: str,
    seed: int,
    start: Start,
    undisturbed: Callable[..., Path],
) -> None:
    """The state comes from memory: that of the machines, or a replica of the one that is lost."""
    chance = random.Random(seed)
    words = ("train.checkpoint_every=0", "recovery.snapshot_every=1")
    agents = start(3, "never", *words, plan=SHARDED, nnodes="3:3")
    moment = chance.randrange(3, 8)
    agents.wait_for(lambda: agents.steps() >= moment)
    victim = chance.randrange(1, 4)
    kill(agents, victim)
    if kill is Agents.kill:
        agents.start(victim)
    agents.wait_for(lambda: len(agents.restarts()) == 1)
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    assert recovery["source"] == source
    assert recovery["steps_repeated"] <= 1
    snapshots = summary["snapshots"]
    assert snapshots["replica_bytes"] >= snapshots["count"] * snapshots["bytes"] > 0
    assert not differences(agents.run, undisturbed(3, SHARDED))


@pytest.mark.long
def test_two_machines_that_are_lost_together_take_the_run_back_to_a_checkpoint(
    start: Start, undisturbed: Callable[..., Path]
) -> None:
    agents = start(3, "never", "recovery.snapshot_every=1", nnodes="3:3")
    agents.wait_for(lambda: agents.steps() >= 5)
    agents.kill(1)
    agents.kill(2)
    agents.start(1, 2)
    agents.wait_for(lambda: len(agents.restarts()) == 1)
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    assert (recovery["source"], recovery["steps_repeated"] <= 2) == ("checkpoint", True)
    assert not differences(agents.run, undisturbed(3))


@pytest.mark.long
def test_a_world_that_the_plan_does_not_fit_ends_with_a_sentence(start: Start) -> None:
    agents = start(2, "never", nnodes="1:2", restarts=1)
    agents.wait_for(lambda: agents.steps() >= 3)
    agents.kill(1)
    assert agents.codes() == [1]
    assert "the plan needs 2 ranks" in agents.logs() or "dp2" in agents.logs()
    assert "Traceback" not in agents.logs().partition("torch/distributed")[0]
