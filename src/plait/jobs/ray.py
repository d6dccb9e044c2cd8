"""A Python script for Ray: one actor a machine, in which torchrun runs.

Calls as in Ray's pages "Placement Groups" and "Ray Jobs CLI".
"""

from __future__ import annotations

import shlex

from plait.jobs.agent import MARGIN_SECONDS
from plait.jobs.job import PORT, JobScript, TrainJob

_TEXT = '''"""{shape}.

Run by `ray job submit`. If a machine is lost, the others are stopped and all start again, on the
machines that Ray then has. Each start goes on from the newest whole checkpoint (`--resume auto`),
so a machine that is taken away costs the steps since then: see `train.checkpoint_every`. A machine
that shuts down by itself sends SIGTERM, after which its ranks save: that start ends, and the next
goes on. A start that fails without a new checkpoint ends the job.
"""

import os
import subprocess
import sys
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
RANKS_PER_NODE = {ranks_per_node}
NUM_GPUS = {gpus}  # of each machine
PORT = {port}  # where the ranks meet, on the first machine
RESTARTS = 20  # after lost machines
LATEST = {latest!r}  # names the newest whole checkpoint
# An agent kills its ranks 30 s after a signal; a save may take {deadline}.
PATIENCE = {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "{patience}"}}
TRAIN = {words}


# Ray itself never starts a machine again: a start of one alone would wait for the others.
@ray.remote(max_restarts=0)
class Machine:
    """One machine of the run."""

    def address(self):
        return ray.util.get_node_ip_address()

    def train(self, node_rank, head):
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={{NODES}}", f"--nproc-per-node={{RANKS_PER_NODE}}"]
        command += [f"--node-rank={{node_rank}}", f"--master-addr={{head}}"]
        # torchrun starts lost ranks of machines that are still there.
        command += [f"--master-port={{PORT}}", "--max-restarts=3", "-m", "plait", *TRAIN]
        return subprocess.run(command, check=False, env={{**os.environ, **PATIENCE}}).returncode


def run_once():
    """The exit code of one start on all machines; None if a machine was lost."""
    bundle = {{"CPU": RANKS_PER_NODE, **({{"GPU": NUM_GPUS}} if NUM_GPUS else {{}})}}
    # Each bundle lies on a machine of its own.
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())  # waits until Ray has so many machines
        machines = [
            Machine.options(
                num_cpus=RANKS_PER_NODE,
                num_gpus=NUM_GPUS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index in range(NODES)
        ]
        head = ray.get(machines[0].address.remote())
        codes = ray.get([one.train.remote(rank, head) for rank, one in enumerate(machines)])
        return max(codes, key=abs)
    except RayActorError as error:
        print(f"a machine was lost: {{error}}", file=sys.stderr)
        return None
    finally:
        remove_placement_group(group)  # ends the machines that are left


def newest():
    """The newest whole checkpoint, or nothing."""
    latest = Path(LATEST)
    return latest.read_text() if latest.exists() else ""


ray.init()
for _ in range(1 + RESTARTS):
    before = newest()
    code = run_once()
    if code == 0 or (code is not None and newest() == before):
        break
sys.exit(1 if code is None else code)
'''


def script(job: TrainJob) -> JobScript:
    """The script. The run folder must be on a file system that every machine sees."""
    text = _TEXT.format(
        shape=job.shape("node"),
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        gpus=job.ranks_per_node if job.gpus else 0,
        port=PORT,
        words=repr(job.train_words()),
        latest=f"{job.run_folder}/checkpoints/latest",
        deadline=job.deadline_seconds,
        patience=job.deadline_seconds + MARGIN_SECONDS,
    )
    file = f"{job.name.replace('-', '_')}_ray.py"
    submit = f"ray job submit --working-dir . -- python {shlex.quote(file)}"
    notes = ["the run's folder must lie where every machine sees it"]
    return JobScript("ray", text, file, submit, job.world_size, notes)
