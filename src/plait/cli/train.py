"""`plait train`: from a config to a trained model in a folder, on local ranks or in torchrun's
world.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.launcher import joined_world, launch
from plait.launcher.main_process import is_main_process, say
from plait.run import job

if TYPE_CHECKING:
    from plait.run.rundir import RunFolder

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait train`."""
    common.add_config(parser)
    parser.add_argument(
        "--plan",
        metavar="TEXT",
        help="how to split it, as 'dp2:zero3', or auto (default: the config's plan)",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="ranks to start (default: what the plan needs)"
    )
    common.add_steps(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/<config>-<time>)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=Path("latest"),
        metavar="latest|auto|DIR",
        help="continue a run: latest (the default) of --out or of this config; auto: that, or a "
        "fresh start; or a run's folder, or one of its checkpoints",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Train. Errors: those of the config and the plan before any rank is started, then those of the
    ranks.
    """
    from plait.checkpoint.folder import sweep
    from plait.engine.runlock import held

    config = common.read_config(arguments)
    plan = common.plan_of(config, arguments.plan, arguments.nproc)
    folder, checkpoint = _folder(arguments)
    if folder is None:
        joining = job.Job(config, str(plan), checkpoint=checkpoint, watches_itself=True)
        launched(joining, plan.world_size)
        return Answer(None)
    alone = joined_world() is None
    task = job.Job(
        config, str(plan), folder=folder.path, checkpoint=checkpoint, watches_itself=not alone
    )
    lock = held(folder.path) if is_main_process() else contextlib.nullcontext(None)
    start = "" if checkpoint is None else f", from {checkpoint.name}"
    try:
        with lock as since:
            removed = [] if since is None else sweep(folder.path, since)
            if removed:
                say(f"plait train: removed what killed saves left: {', '.join(removed)}")
            say(f"plait train: {plan} on {common.ranks(plan)}, into {folder.path}{start}")
            result = launched(task, plan.world_size)
    finally:
        folder.remove_if_empty()
    return Answer(result, view(result)) if is_main_process() else Answer(None)


def _folder(arguments: argparse.Namespace) -> tuple[RunFolder | None, Path | None]:
    """The folder of the run and the checkpoint to start from. Rank 0 of a world chooses the folder
    of a new run for all.
    """
    from plait.run.rundir import auto_source, fresh_run, is_word, new_run, resumed_run

    name = Path(arguments.config).stem
    source = arguments.resume
    if source is None:
        return (new_run(arguments.out, name) if is_main_process() else None), None
    if not is_word(source, AUTO):
        return resumed_run(source, arguments.out, name)
    before = auto_source(arguments.out, name)
    if before is not None:
        return resumed_run(None, before, name)
    return (fresh_run(arguments.out, name) if is_main_process() else None), None


def launched(task: job.Job, num_ranks: int) -> Json:
    """The job's numbers, from its ranks; a bar that a failed rank left behind gives the cursor
    back.
    """
    try:
        with task.supervision.outside():
            return launch(job.run, task, nproc=num_ranks, restarts=task.config.train.restarts)[0]
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")


def view(result: Json) -> str:
    """The numbers for people."""
    traffic = (
        ", ".join(f"{axis} {sent / 1e6:,.1f} MB" for axis, sent in result["traffic"].items())
        or "none"
    )
    here = result["steps_here"]
    ms = (result["step_seconds_median"] or 0) * 1e3
    lines = [
        f"plan          {result['plan']}",
        f"steps         {result['steps']}"
        + ("" if here == result["steps"] else f", the last {here} here"),
        f"final loss    {'-' if result['final_loss'] is None else format(result['final_loss'], '.4f')}",
        f"speed         {result['tokens_per_second']:,.0f} tokens/s, {ms:,.1f} ms a step",
        f"peak memory   {max(result['peak_memory']) / 1e6:,.0f} MB in the fullest rank",
        f"traffic       {traffic} sent by a rank in a step",
        f"written to    {result['out']}",
    ]
    return "\n".join(lines)
