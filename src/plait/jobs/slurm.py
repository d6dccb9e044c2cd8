"""A batch script for Slurm. One task is one rank, so that Slurm's signals reach the ranks.

Options as in Slurm's manual pages of `sbatch`, `srun` and `scontrol`.
"""

from __future__ import annotations

import shlex

from plait.jobs.job import PORT, JobScript, TrainJob

MARGIN_SECONDS = 30
"""Seconds between the deadline of a save and the end of the job's time."""


def script(job: TrainJob) -> JobScript:
    """The batch script. A job that is preempted or out of time saves, and is queued again."""
    warning = job.deadline_seconds + MARGIN_SECONDS
    gpus = [f"#SBATCH --gpus-per-node={job.ranks_per_node}"] if job.gpus else []
    lines = [
        "#!/bin/bash",
        f"# {job.shape('node')}.",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={job.ranks_per_node}",
        *gpus,
        "#SBATCH --cpus-per-task=8",
        f"#SBATCH --time={job.hours}:00:00",
        "# Slurm sends SIGUSR1 to every rank before the time is up; plait then saves and leaves.",
        f"#SBATCH --signal=USR1@{warning}",
        "# A job that was preempted goes back into the queue, and --resume auto goes on.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        "# Your cluster may ask for these:",
        "##SBATCH --partition=YOUR_PARTITION",
        "##SBATCH --account=YOUR_ACCOUNT",
        "",
        "set -u",
        "# The ranks meet at the first machine of the job.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"MASTER_PORT=${{PORT:-$(({PORT} + SLURM_JOB_ID % 1000))}}",
        "export MASTER_ADDR MASTER_PORT",
        "",
        "# Activate your environment here:",
        "# source .venv/bin/activate",
        "",
        "srun --kill-on-bad-exit=1 bash -c '",
        "  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS",
        f"  export LOCAL_WORLD_SIZE={job.ranks_per_node}",
        '  exec plait "$@"',
        f"' plait {job.train_line()}",
        "code=$?",
        "",
        "# 138 and 143: SIGUSR1 and SIGTERM after a whole checkpoint. The job goes on later.",
        'if [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "  exit 0",
        "fi",
        'exit "$code"',
        "",
    ]
    file = f"{job.name}.sbatch"
    notes = ["the partition, the account and the environment are yours to fill in"]
    submit = f"sbatch {shlex.quote(file)}"
    return JobScript("slurm", "\n".join(lines), file, submit, job.world_size, notes)
