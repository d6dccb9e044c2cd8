"""What each scheduler sends before it takes machines, to the script that `plait launch` writes.

The scripts run here: under the shell, with a Slurm of a few lines, and as pods without containers.
A signal makes the ranks save; the exit code is the one that starts the job again; and the next
start goes on to the end, each step once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.cli import main
from tests.architecture.source import ROOT
from tests.cli.test_launch_script import CONFIG, free_port

LIMIT_SECONDS = 240  # against hanging, not a measurement
STEPS = 300

pytestmark = [pytest.mark.long, pytest.mark.slow]

SRUN = """#!/bin/bash
# srun: a task for each rank. A signal goes to every task; the highest exit code is the answer.
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  pids+=($!)
done
echo "${pids[@]}" > "$SLURM_FOLDER/tasks"
highest=0
for pid in "${pids[@]}"; do
  wait "$pid"; code=$?
  if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
# scontrol: the names of the job's machines, and a note of what is queued again.
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SLURM_FOLDER/requeued"; fi
"""


class Site:
    """A folder with a config, a script for it, and programs in front of the machine's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.config = folder / "tiny.toml"
        self.config.write_text(CONFIG.replace("steps = 3", f"steps = {STEPS}"))
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        own = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{own}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PORT": str(free_port()),
            "SLURM_FOLDER": str(folder),
        }
        self._started: list[subprocess.Popen[str]] = []

    def script(self, target: str, nodes: int = 1) -> str:
        """The text that `plait launch` writes."""
        out = self.folder / target
        kept = {"kubernetes": "/runs/run", "skypilot": "/checkpoints/run"}  # below their mounts
        words = ["launch", str(self.config), "--for", target, "--nodes", str(nodes), "--cpu"]
        words += ["--out", str(out), "--run-folder", kept.get(target, str(self.run))]
        assert main(words) == 0
        return out.read_text()

    def start(self, text: str, **environment: str) -> subprocess.Popen[str]:
        """A shell that runs a text."""
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def steps(self) -> list[int]:
        """The steps that the run has told of."""
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def wait_for_steps(self, count: int, *processes: subprocess.Popen[str]) -> None:
        """Return once so many steps are done."""
        end = time.monotonic() + LIMIT_SECONDS
        while len(self.steps()) < count:
            for process in processes:
                assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.02)

    def is_done(self) -> bool:
        """Whether every step was done once, in order."""
        return self.steps() == list(range(1, STEPS + 1))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_torchrun_hands_the_signal_on_and_answers_it(
    number: signal.Signals, code: int, site: Site
) -> None:
    text = site.script("torchrun")
    job = site.start(text)
    site.wait_for_steps(5, job)
    job.send_signal(number)
    found, output = ended(job)
    assert found == code, output
    assert "ended after step" in output
    assert len(site.steps()) < STEPS
    found, output = ended(site.start(text))
    assert found == 0, output
    assert "from step-" in output
    assert site.is_done()


def test_a_failure_is_no_request_to_end(site: Site) -> None:
    text = site.script("torchrun")
    site.config.write_text("[model]\nname = 'nothing'\n")
    found, output = ended(site.start(text, MAX_RESTARTS="0"))
    assert found == 1, output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_queues_a_job_again_that_is_out_of_time_or_preempted(
    number: signal.Signals, site: Site
) -> None:
    """SIGUSR1 comes before the time is up, SIGTERM at a preemption: both to every task."""
    text = site.script("slurm")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    job = site.start(text, **variables)
    site.wait_for_steps(5, job)
    for task in (site.folder / "tasks").read_text().split():
        os.kill(int(task), number)
    found, output = ended(job)
    assert found == 0, output
    assert (site.folder / "requeued").read_text() == "requeue 7\n"
    found, output = ended(site.start(text, **variables))
    assert found == 0, output
    assert site.is_done()
    assert (site.folder / "requeued").read_text() == "requeue 7\n"


def test_slurm_does_not_queue_a_failure_again(site: Site) -> None:
    text = site.script("slurm")
    site.config.write_text("[model]\nname = 'nothing'\n")
    found, output = ended(site.start(text, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="here"))
    assert found == 2, output
    assert not (site.folder / "requeued").exists()


def pod_text(site: Site) -> tuple[str, dict[str, Any]]:
    """The command of a pod, with its volumes and its name in the places of this machine."""
    parts = list(yaml.safe_load_all(site.script("kubernetes", nodes=2)))
    job = parts[-1]["spec"]
    container = job["template"]["spec"]["containers"][0]
    shell, option, text = container["command"]
    assert (shell, option) == ("/bin/bash", "-c")
    (site.folder / "config").mkdir(exist_ok=True)
    (site.folder / "config" / "config.toml").write_text(parts[0]["data"]["config.toml"])
    text = text.replace("/config/config.toml", str(site.folder / "config" / "config.toml"))
    text = re.sub(r"/runs/\S+", str(site.run), text)
    text = re.sub(r"endpoint=\S+", f"endpoint=127.0.0.1:{free_port()}", text)
    return text, job


@pytest.mark.parametrize("evicted", [0, 1])
def test_kubernetes_replaces_a_pod_that_is_evicted(evicted: int, site: Site) -> None:
    """The kubelet sends SIGTERM, and the Job starts a pod again until it ends well."""
    text, job = pod_text(site)
    ignored = [rule["onExitCodes"]["values"] for rule in rules_on_codes(job)]
    pods = [site.start(text, JOB_COMPLETION_INDEX=str(index)) for index in range(2)]
    site.wait_for_steps(5, *pods)
    begun = time.monotonic()
    pods[evicted].send_signal(signal.SIGTERM)
    code, output = ended(pods[evicted])
    assert code == 143, output
    assert [code] in ignored
    assert time.monotonic() - begun < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert (site.run / "checkpoints" / "latest").exists()  # it saves at its end alone
    pods[evicted] = site.start(text, JOB_COMPLETION_INDEX=str(evicted))
    failures = 0
    while any(pod.poll() != 0 for pod in pods):
        for index, pod in enumerate(pods):
            if pod.poll() not in (None, 0):
                failures += 1
                assert failures <= job["backoffLimit"], pod.communicate()[0]
                pods[index] = site.start(text, JOB_COMPLETION_INDEX=str(index))
        time.sleep(0.2)
    assert site.is_done()
    assert failures == (0 if evicted else 1)


def rules_on_codes(job: dict[str, Any]) -> list[dict[str, Any]]:
    rules = job["podFailurePolicy"]["rules"]
    return [rule for rule in rules if rule["action"] == "Ignore" and "onExitCodes" in rule]


def test_skypilot_starts_a_machine_again_that_shuts_down(site: Site) -> None:
    task = yaml.safe_load(site.script("skypilot"))
    activate = site.folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("")
    text = re.sub(r"/checkpoints/\S+", str(site.run), task["run"])
    text = re.sub(r"--master-port=\d+", f"--master-port={free_port()}", text)
    nodes = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    job = site.start(text, **nodes)
    site.wait_for_steps(5, job)
    job.send_signal(signal.SIGTERM)
    code, output = ended(job)
    assert code in task["resources"]["job_recovery"]["recover_on_exit_codes"], output
    code, output = ended(site.start(text, **nodes))
    assert code == 0, output
    assert site.is_done()
