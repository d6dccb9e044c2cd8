"""Replays with two agents on loopback addresses, each of which stands for a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import CONFIG
from tests.fault.agents import Agents

STEPS = 12
DATA = CONFIG.replace('name = "random"\nseq_len = 8', 'python = "tests.fault.faulty:data"')
Start = Callable[..., Agents]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts two agents whose second rank commits a fault."""
    begun: list[Agents] = []
    monkeypatch.setenv("MACHINE_OF_RANK", "1")

    def starting(kind: str, step: int, *settings: str) -> Agents:
        fault = {"kind": kind, "rank": 1, "step": step, "bit": 20, "element": 5}
        monkeypatch.setenv("PLANTED", json.dumps(fault))
        common = (f"train.steps={STEPS}", "train.global_batch=6", "cluster.name=rtx4090x4")
        agents = Agents(
            tmp_path, "--plan", "dp2", "--set", *common, *settings, nnodes="2:2", restarts=0
        )
        begun.append(agents)
        (tmp_path / "tiny.toml").write_text(DATA)
        agents.hurry()
        agents.start(1, 2)
        return agents

    yield starting
    for agents in begun:
        agents.end()


def findings(agents: Agents) -> list[dict[str, Any]]:
    """The findings of the doctor of a run."""
    text = (agents.run / "doctor" / "findings.jsonl").read_text()
    return [*map(json.loads, text.splitlines())]


@pytest.mark.long
def test_a_wrong_update_is_told_by_the_replay_of_two_machines(start: Start) -> None:
    """Each rank reads the part of the other from its own memory, where it was sent."""
    agents = start("wrong update", 6, "recovery.check_replicas_every=2")
    assert all(agents.codes())
    (found,) = [one for one in findings(agents) if one["kind"] == "corruption"]
    assert (found["rank"], found["step"]) == (1, 6), agents.logs()
    assert "a replay of its update from step 5 gives other bits" in found["cause"]


@pytest.mark.long
def test_a_passing_fault_is_told_by_the_replay_of_two_machines(start: Start) -> None:
    """The replay begins at the newest checkpoint, as both machines see the folder of the run."""
    agents = start("NaN weight", 7, "recovery.on_nan=back", "train.checkpoint_every=2")
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    assert (recovery["source"], recovery["steps_repeated"], recovery["lost_ranks"]) == (
        "checkpoint",
        0,
        [],
    )
    (found,) = [one for one in findings(agents) if one["kind"] == "nan"]
    assert (found["rank"], found["step"], found["replayed_from"]) == (1, 7, 6), agents.logs()
    assert found["cause"].startswith("passing")
