"""Replays under torchrun: by one agent, and by two or three, each of which stands for a machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.plan import Plan
from tests.cli.command import CONFIG, plait
from tests.fault.agents import ROOT, Agents
from tests.fault.kills import differences

STEPS = 12
COMMON = (f"train.steps={STEPS}", "train.global_batch=6", "cluster.name=rtx4090x4")
DATA = CONFIG.replace('name = "random"\nseq_len = 8', 'python = "tests.fault.faulty:data"')
Start = Callable[..., Agents]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts agents, one a rank, whose second rank commits a fault."""
    begun: list[Agents] = []
    monkeypatch.setenv("MACHINE_OF_RANK", "1")

    def starting(kind: str, step: int, *settings: str, plan: str = "dp2") -> Agents:
        fault = {"kind": kind, "rank": 1, "step": step, "bit": 20, "element": 5}
        monkeypatch.setenv("PLANTED", json.dumps(fault))
        ranks = Plan.parse(plan).world_size
        words = ("--plan", plan, "--set", *COMMON, *settings)
        agents = Agents(tmp_path, *words, nnodes=f"{ranks}:{ranks}", restarts=0)
        begun.append(agents)
        (tmp_path / "tiny.toml").write_text(DATA)
        agents.hurry()
        agents.start(*range(1, ranks + 1))
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
def test_without_snapshots_the_replay_of_two_machines_begins_at_a_checkpoint(start: Start) -> None:
    """Both machines see the folder of the run."""
    settings = ("recovery.snapshot_every=0", "train.checkpoint_every=2")
    agents = start("NaN weight", 7, "recovery.on_nan=back", *settings)
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


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp2 mb3", "tp2", "dp3:zero3", "pp2:1f1b mb3"])
def test_machines_go_back_to_their_snapshots(
    plan: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines have each other's parts as replicas. Of three, each is sent one more. They end
    with the bits of an undisturbed run of plait's own launcher, and keep nothing of what came.
    """
    (tmp_path / "tiny.toml").write_text(DATA)
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    words = ("train", "tiny.toml", "--plan", plan, "--out", "calm", "--set", *COMMON)
    calm = plait(*words, cwd=tmp_path)
    assert calm.code == 0, calm.err
    agents = start("NaN weight", 8, "recovery.on_nan=back", plan=plan)
    summary = agents.finish()
    (recovery,) = summary["recoveries"]
    told = (recovery["source"], recovery["steps_repeated"], recovery["lost_ranks"])
    assert told == ("snapshot", 0, []), agents.logs()
    (found,) = [one for one in findings(agents) if one["kind"] == "nan"]
    assert found["replayed_from"] == 7, agents.logs()
    assert found["cause"].startswith("passing")
    assert differences(agents.run, tmp_path / "calm") == []
    assert summary["snapshots"]["count"] > STEPS


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3", "tp2"])
def test_ranks_of_one_agent_go_back_to_their_snapshots(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end with the bits of an undisturbed run of plait's own launcher, and as it goes back."""
    (tmp_path / "tiny.toml").write_text(DATA)
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    command = ("train", "tiny.toml", "--plan", plan, "--steps", str(STEPS), "--json", "--set")
    back = ("recovery.on_nan=back", "recovery.snapshot_every=1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    calm = plait(*command, "train.checkpoint_every=2", "--out", "calm", cwd=tmp_path)
    assert calm.code == 0, calm.err
    fault = {"kind": "NaN weight", "rank": 1, "step": 8}
    monkeypatch.setenv("PLANTED", json.dumps(fault))
    own = plait(*command, *back, "--out", "own", cwd=tmp_path)
    assert own.code == 0, own.err
    agent = (*torchrun, "-m", "plait")
    theirs = plait(*command, *back, "--out", "theirs", cwd=tmp_path, python=agent)
    assert theirs.code == 0, theirs.err
    told = []
    for name in ("own", "theirs"):
        assert differences(tmp_path / name, tmp_path / "calm") == []
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        (recovery,) = summary["recoveries"]
        told.append({**recovery, "seconds": 0, "moment": 0})
        assert summary["snapshots"]["count"] > STEPS
    assert told[0] == told[1]
    assert (told[0]["source"], told[0]["steps_repeated"]) == ("snapshot", 0)
