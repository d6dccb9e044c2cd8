"""A task for SkyPilot. Fields as in SkyPilot's page "SkyPilot YAML"."""

from __future__ import annotations

import shlex

from plait.jobs.agent import agent_lines
from plait.jobs.job import PORT, JobScript, TrainJob, yaml_text
from plait.values import JsonObject

CHECKPOINTS = "/checkpoints"
ASKED_TO_END = (143, 138)
"""Exit codes after SIGTERM and SIGUSR1."""


def script(job: TrainJob) -> JobScript:
    """The task. A managed job that loses its machines starts again and goes on.

    Errors: `ConfigError` for a run's folder outside the bucket.
    """
    options = [
        "--nnodes=$SKYPILOT_NUM_NODES",
        f"--nproc-per-node={job.ranks_per_node}",
        "--node-rank=$SKYPILOT_NODE_RANK",
        f"--master-addr=$HEAD --master-port={PORT} --max-restarts=3",
    ]
    lines = [
        "source .venv/bin/activate",
        'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        *agent_lines(job, options, job.train_line(out=job.run_folder_below(CHECKPOINTS))),
    ]
    # A machine that shuts down ends the ranks before SkyPilot sees that it is gone.
    recovery: JsonObject = {"recover_on_exit_codes": [*ASKED_TO_END]}
    resources: JsonObject = {"use_spot": True, "job_recovery": recovery}
    if job.gpus:
        resources = {"accelerators": f"H100:{job.ranks_per_node}", **resources}
    task: JsonObject = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "workdir": ".",
        "file_mounts": {CHECKPOINTS: {"name": "YOUR-BUCKET", "mode": "MOUNT"}},
        "setup": "python3 -m venv .venv\nsource .venv/bin/activate\npip install plait\n",
        "run": "\n".join(lines),
    }
    head = [
        f"# {job.shape('node')}.",
        "# Checkpoints lie in a bucket, so that a spot machine may be taken away at any time.",
    ]
    text = "\n".join([*head, yaml_text(task), ""])
    file = f"{job.name}.sky.yaml"
    notes = ["the accelerator and the bucket are yours to fill in"]
    submit = f"sky jobs launch {shlex.quote(file)}"
    return JobScript("skypilot", text, file, submit, job.world_size, notes)
