"""The batch script under Slurm itself: a loopback cluster of one machine, and a job that is queued
again. Skipped where Slurm is not installed, or its daemons may not run.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.cli import main
from tests.architecture.source import ROOT
from tests.cli.test_launch_script import CONFIG, free_port

LIMIT_SECONDS = 240  # against hanging, not a measurement
STEPS = 400
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel")

pytestmark = [
    pytest.mark.skipif(
        not all(shutil.which(name) for name in PROGRAMS), reason="Slurm is not installed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons run as root"),
]


def cluster_text(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    return f"""
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmUser={getpass.getuser()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=OFF
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Commands of Slurm on a cluster of this machine alone."""
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    config = tmp_path / "slurm.conf"
    config.write_text(cluster_text(tmp_path))
    environment = {**os.environ, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PORT"] = str(free_port())
    environment["PYTHONPATH"] = str(ROOT / "src")

    def command(*words: str) -> str:
        done = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    daemons = [
        subprocess.Popen([name, "-D"], env=environment, stderr=subprocess.DEVNULL)
        for name in ("slurmctld", "slurmd")
    ]
    try:
        yield command
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def wait_until(true: Callable[[], bool], told: Callable[[], str]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < end, told()
        time.sleep(0.5)


class Job:
    """A run of `STEPS` steps that is handed in."""

    def __init__(self, slurm: Callable[..., str], folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder
        self.run = folder / "run"
        self.metrics = self.run / "metrics.jsonl"
        config = folder / "tiny.toml"
        config.write_text(CONFIG.replace("steps = 3", f"steps = {STEPS}"))
        script = folder / "job.sbatch"
        words = ["launch", str(config), "--for", "slurm", "--nodes", "1", "--cpu"]
        assert main([*words, "--out", str(script), "--run-folder", str(self.run)]) == 0
        wait_until(lambda: "idle" in slurm("sinfo"), lambda: slurm("sinfo"))
        self.number = slurm("sbatch", "--parsable", str(script)).strip()

    def shown(self) -> str:
        return self._slurm("scontrol", "show", "job", self.number)

    def state(self) -> str:
        """Words for a test that fails."""
        return self.shown() + "".join(path.read_text() for path in self._folder.glob("*.log"))

    def steps(self) -> list[int]:
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def begin(self) -> None:
        """Return once steps are done."""
        wait_until(lambda: len(self.steps()) > 20, self.state)

    def finish(self) -> None:
        """Start the queued job now, and see it end with each step done once."""
        wait_until(lambda: "Restarts=1" in self.shown(), self.state)
        assert len(self.steps()) < STEPS
        self._slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        wait_until(lambda: "JobState=COMPLETED" in self.shown(), self.state)
        assert json.loads((self.run / "summary.json").read_text())["steps"] == STEPS
        assert self.steps() == list(range(1, STEPS + 1))


def test_a_job_is_queued_again_and_goes_on(slurm: Callable[..., str], tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.begin()
    slurm("scancel", "--signal=USR1", job.number)
    job.finish()


def test_a_job_that_is_preempted_saves_and_goes_on(
    slurm: Callable[..., str], tmp_path: Path
) -> None:
    """A job of a partition that goes first takes the machine: Slurm sends SIGTERM to the ranks."""
    job = Job(slurm, tmp_path)
    job.begin()
    words = ("--partition=urgent", "--exclusive", "--output=urgent.log", "--wrap", "sleep 2")
    urgent = slurm("sbatch", "--parsable", *words).strip()
    wait_until(lambda: "Restarts=1" in job.shown(), job.state)
    logs = "".join(path.read_text() for path in tmp_path.glob("plait-*.log"))
    assert "SIGTERM: ended after step" in logs
    ended = ("JobState=COMPLETED", "Invalid job id")
    wait_until(
        lambda: any(word in slurm("scontrol", "show", "job", urgent) for word in ended), job.state
    )
    job.finish()
