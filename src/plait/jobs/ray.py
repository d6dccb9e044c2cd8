"""A Python script for Ray: one actor a machine, in which torchrun runs.

Calls as in Ray's pages "Placement Groups" and "Ray Jobs CLI".
"""

from __future__ import annotations

import shlex

from plait.jobs.job import PORT, JobScript, TrainJob

_TEXT = '''"""{shape}.

Run by `ray job submit`.
"""

import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
RANKS_PER_NODE = {ranks_per_node}
NUM_GPUS = {gpus}
PORT = {port}
TRAIN = {words}


@ray.remote(max_restarts=0)
class Machine:
    """One machine of the run."""

    def address(self):
        return ray.util.get_node_ip_address()

    def train(self, node_rank, head):
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={{NODES}}", f"--nproc-per-node={{RANKS_PER_NODE}}"]
        command += [f"--node-rank={{node_rank}}", f"--master-addr={{head}}"]
        command += [f"--master-port={{PORT}}", "--max-restarts=3", "-m", "plait", *TRAIN]
        return subprocess.run(command, check=False).returncode


ray.init()
bundle = {{"CPU": RANKS_PER_NODE, **({{"GPU": NUM_GPUS}} if NUM_GPUS else {{}})}}
group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
machines = [
    Machine.options(
        num_cpus=RANKS_PER_NODE,
        num_gpus=NUM_GPUS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
    ).remote()
    for index in range(NODES)
]
head = ray.get(machines[0].address.remote())
codes = ray.get([machine.train.remote(rank, head) for rank, machine in enumerate(machines)])
sys.exit(max(codes, key=abs))
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
    )
    file = f"{job.name.replace('-', '_')}_ray.py"
    submit = f"ray job submit --working-dir . -- python {shlex.quote(file)}"
    notes = ["the run's folder must lie where every machine sees it"]
    return JobScript("ray", text, file, submit, job.world_size, notes)
