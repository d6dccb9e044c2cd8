"""Shell lines that run an agent of torchrun, and hand a scheduler's signal on to it.

The agent's own exit code after a signal is that of any failure. A scheduler that takes a machine
away reads the code, so the shell around the agent answers in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.jobs.job import TrainJob

MARGIN_SECONDS = 10
"""Seconds that an agent waits for its ranks beyond the deadline of a save."""


def agent_lines(job: TrainJob, options: Sequence[str], train_line: str) -> list[str]:
    """Lines for bash. SIGTERM and SIGUSR1 end with the codes 143 and 138, after the save.

    `options` are those of torchrun, quoted. A run that ends well by itself has the code 0.
    """
    patience = job.deadline_seconds + MARGIN_SECONDS
    command = ["torchrun", *options, "-m plait"]
    return [
        f"# An agent kills its ranks 30 s after a signal; a save may take {job.deadline_seconds}.",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}",
        "# Before a machine is taken away, a signal comes. The ranks then end a step and save.",
        "asked=0",
        'end() { [ "$asked" -ne 0 ] || { asked=$1; kill -TERM "$agent" || true; }; }',
        "trap 'end 143' TERM; trap 'end 138' USR1; trap 'end 130' INT",
        "set -m  # signals of the terminal come to this shell alone",
        " \\\n  ".join(command) + " \\\n  " + train_line + " &",
        "agent=$!",
        "code=0",
        'wait "$agent" || code=$?',
        'while kill -0 "$agent" 2>/dev/null; do code=0; wait "$agent" || code=$?; done',
        "# 143, 138 and 130: the run was asked to end, and goes on when this starts again.",
        'if [ "$code" -ne 0 ] && [ "$asked" -ne 0 ]; then code=$asked; fi',
        'exit "$code"',
    ]
