"""A shell script for torchrun: the same script runs on every machine."""

from __future__ import annotations

import shlex

from plait.jobs.agent import agent_lines
from plait.jobs.job import PORT, JobScript, TrainJob


def script(job: TrainJob) -> JobScript:
    """The script. `MAX_RESTARTS` and the address come from the environment, with defaults."""
    lines = [
        "#!/bin/bash",
        f"# {job.shape('machine')}.",
        "set -eu",
        "",
        "# Activate your environment here:",
        "# source .venv/bin/activate",
        "",
    ]
    if job.nodes == 1:
        options = ["--standalone", f"--nproc-per-node={job.ranks_per_node}"]
        file = f"{job.name}.sh"
        submit = f"bash {shlex.quote(file)}"
        notes: list[str] = []
    else:
        lines += [
            "# The first machine, as every other one reaches it. The script runs on each machine:",
            "#   HEAD=first-machine bash this-script",
            ': "${HEAD:?set HEAD to the name or the address of the first machine}"',
            "# Each start has a store of its own, so that a machine may be lost and come back:",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            "",
        ]
        options = [
            f"--nnodes={job.nodes}",
            f"--nproc-per-node={job.ranks_per_node}",
            "--rdzv-backend=c10d",
            f'--rdzv-endpoint="$HEAD:${{PORT:-{PORT}}}"',
            f'--rdzv-id="${{RUN_ID:-{job.name}}}"',
        ]
        file = f"{job.name}.sh"
        submit = f"HEAD=first-machine bash {shlex.quote(file)}   (on each machine)"
        notes = ["HEAD is the first machine; the network between them must be private"]
    lines += [
        "# A rank that dies starts all ranks again, and --resume auto goes on from the newest",
        "# whole checkpoint.",
        *agent_lines(job, [*options, '--max-restarts="${MAX_RESTARTS:-3}"'], job.train_line()),
        "",
    ]
    return JobScript("torchrun", "\n".join(lines), file, submit, job.world_size, notes)
