"""`plait train`: from a config to a trained model in a folder, on local ranks or in torchrun's
world.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from plait.cli import common, live, replanning
from plait.cli.answer import Answer, Json
from plait.cli.recomputation import with_remat
from plait.errors import CheckpointError, ConfigError
from plait.launcher import is_restart, joined_world, launch, run_id
from plait.launcher.main_process import is_main_process, say
from plait.plan import Plan, kept_text, remat_text
from plait.run import job

if TYPE_CHECKING:
    from plait.run.rundir import RunFolder

AUTO = "auto"
FILE_SECONDS = 2.0  # by which a file system's clock may be behind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait train`."""
    common.add_config(parser)
    parser.add_argument(
        "--plan",
        metavar="TEXT",
        help="how to split the model, such as 'dp2:zero3', or auto (default: the config's plan)",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="ranks to start (default: what the plan needs)"
    )
    common.add_steps(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/<config>-<time>)"
    )
    parser.add_argument(
        "--profile",
        type=int,
        metavar="STEP",
        help="record this step with torch's profiler; its files go to profile/ in the run's folder",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=Path("latest"),
        metavar="latest|auto|DIR",
        help="continue a run. latest (the default): the newest one of --out, or of this config; "
        "auto: the same, or a new run where there is none; DIR: a run's folder or checkpoint",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve the run's page while it trains; the first line on stdout is its address",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Train. Errors: those of the config and the plan before any rank is started, then those of the
    ranks.

    Raises:
        ConfigError: the step to profile is none of the run.
    """
    if arguments.live:
        live.check()
    config = common.read_config(arguments)
    if arguments.profile is not None and not 1 <= arguments.profile <= config.train.steps:
        raise ConfigError(
            f"--profile {arguments.profile} is none of the steps 1 to {config.train.steps}"
        )
    config, plan = replanning.planned(config, arguments.plan, arguments.nproc)
    replanning.check(config, plan)
    config = with_remat(config, plan)
    starts_again = _starts_again(arguments.out)
    folder, checkpoint = _folder(arguments, starts_again)
    if folder is None:
        quiet = job.TrainingRun(
            config,
            str(plan),
            checkpoint=checkpoint,
            watches_itself=True,
            profiled_step=arguments.profile,
        )
        result = kept_alive(quiet, plan.world_size)
        if "stopped" in result:
            end_by_signal(result, quiet, arguments)
        return Answer(None)
    alone = joined_world() is None
    name = run_id()
    if not alone and name is not None:
        folder.run_id.write_text(f"{name}\n")
    task = job.TrainingRun(
        config,
        str(plan),
        folder=folder.path,
        checkpoint=checkpoint,
        watches_itself=not alone,
        profiled_step=arguments.profile,
        began=time.time() - FILE_SECONDS,
        is_restart=starts_again,
    )
    train = partial(_trained, arguments, task, folder, plan)
    return live.served(folder.path, train) if arguments.live else train()


def _trained(
    arguments: argparse.Namespace, task: job.TrainingRun, folder: RunFolder, plan: Plan
) -> Answer:
    """The answer of a run in its folder."""
    from plait.checkpoint.folder import sweep
    from plait.engine.runlock import held

    lock = held(folder.path) if is_main_process() else contextlib.nullcontext(None)
    start = "" if task.checkpoint is None else f", from {task.checkpoint.name}"
    try:
        with lock as since:
            removed = [] if since is None else sweep(folder.path, since)
            if removed:
                say(f"plait train: removed what killed saves left: {', '.join(removed)}")
            say(f"plait train: {plan} on {common.ranks(plan)}, into {folder.path}{start}")
            _tell_what_is_left(task)
            result = kept_alive(task, plan.world_size)
    finally:
        folder.remove_if_empty()
    if "stopped" in result:
        end_by_signal(result, task, arguments)
    return Answer(result, view(result)) if is_main_process() else Answer(None)


def _tell_what_is_left(task: job.TrainingRun) -> None:
    """Say where a checkpoint leaves no step to do, or not the one to profile."""
    from plait.checkpoint.folder import read_index

    if task.checkpoint is None:
        return
    try:
        done = int(read_index(task.checkpoint)["meta"]["step"])
    except (CheckpointError, LookupError, TypeError, ValueError):
        return  # the ranks, which load it, say what is wrong
    steps = task.config.train.steps
    if done >= steps:
        say(f"plait train: no step is left to do: {done} are done, and train.steps = {steps}")
    if task.profiled_step is not None and task.profiled_step <= done:
        say(
            f"plait train: --profile {task.profiled_step} records nothing: the run goes on after "
            f"step {done}"
        )


def end_by_signal(result: Json, task: job.TrainingRun, arguments: argparse.Namespace) -> NoReturn:
    """Say how to go on, and end with the exit code of the signal."""
    name = signal.Signals(result["signal"]).name
    steps = task.config.train.steps
    say(
        f"plait train: {name}: ended after step {result['stopped']} of {steps}, which is saved; "
        f"go on with: {_command_to_go_on(task, arguments)}"
    )
    raise SystemExit(128 + result["signal"])


def _command_to_go_on(task: job.TrainingRun, arguments: argparse.Namespace) -> str:
    """The command that goes on with the same run: a plan and keys that the file lacks are in it."""
    words = ["plait", "train", arguments.config, "--resume", str(task.folder)]
    if arguments.plan is not None:
        words += ["--plan", task.plan]
    for option in ("nproc", "steps"):
        value = getattr(arguments, option)
        words += [] if value is None else [f"--{option}", str(value)]
    if arguments.overrides:
        words += ["--set", *arguments.overrides]
    return shlex.join(words)


def _starts_again(out: Path | None) -> bool:
    """Whether torchrun has started this run before, here or on another machine, into `out`."""
    from plait.run.rundir import RunFolder

    if out is None or is_restart():
        return is_restart()
    told = RunFolder(out).run_id
    name = told.read_text(encoding="utf-8", errors="replace").strip() if told.is_file() else ""
    return name != "" and name == run_id()


def _folder(
    arguments: argparse.Namespace, starts_again: bool
) -> tuple[RunFolder | None, Path | None]:
    """The folder of the run and the checkpoint to start from. Rank 0 of a world chooses both for
    all, but where the user names them.
    """
    from plait.run.rundir import auto_source, fresh_run, is_word, new_run, resumed_run

    name = Path(arguments.config).stem
    source = arguments.resume
    if source is None and starts_again and arguments.out is not None:
        source = Path(AUTO)
    if source is None:
        return (new_run(arguments.out, name) if is_main_process() else None), None
    if not is_word(source, AUTO):
        return resumed_run(source, arguments.out, name)
    if not is_main_process():
        return None, None
    before = auto_source(arguments.out, name)
    if before is None:
        fresh = fresh_run(arguments.out, name)
        _tell_of_parts(fresh.path, "no other is whole, and the run starts over")
        return fresh, None
    _tell_of_parts(before, "the one before it is tried")
    folder, newest = resumed_run(None, before, name)
    return folder, undamaged(newest)


def _tell_of_parts(run: Path, then: str) -> None:
    """Say that the newest checkpoint of a run lacks files, and what happens then."""
    from plait.checkpoint.folder import newest_in_parts

    broken = newest_in_parts(run)
    if broken is not None:
        say(
            f"plait train: {broken.name} is damaged, {then}: not all of its files are in {broken} "
            "with their sizes"
        )


def undamaged(newest: Path) -> Path:
    """The newest checkpoint that can be read to its last byte, from `newest` on.

    An earlier one than `newest` is said. Errors: `CheckpointError` when none can be read.
    """
    from plait.checkpoint import Checkpoint, previous

    checkpoint: Path | None = newest
    first: CheckpointError | None = None
    while checkpoint is not None:
        try:
            Checkpoint.open(checkpoint).verify()
        except CheckpointError as error:
            first = first or error
            say(f"plait train: {checkpoint.name} is damaged, the one before it is tried: {error}")
            checkpoint = previous(checkpoint)
            continue
        return checkpoint
    assert first is not None
    raise first


def launched(task: job.TrainingRun, num_ranks: int) -> Json:
    """The job's numbers, from its ranks; a bar that a failed rank left behind gives the cursor
    back.
    """
    try:
        with task.supervision.outside():
            return launch(job.run, task, nproc=num_ranks, restarts=task.config.train.restarts)[0]
    finally:
        show_cursor()


def _coming_and_going(task: job.TrainingRun, num_ranks: int) -> Json:
    """The job's numbers, from ranks that go on while others are lost and started again."""
    from plait.launcher.supervisor import supervise
    from plait.run import kept

    restarts = task.config.train.restarts
    deadline = task.config.recovery.deadline_seconds
    try:
        with task.supervision.outside():
            found = supervise(kept.run_apart, (task,), num_ranks, restarts, deadline)
            result: Json = found[min(found)]
            return result
    finally:
        show_cursor()


def kept_alive(task: job.TrainingRun, num_ranks: int) -> Json:
    """The job's numbers, from ranks that end well when a signal asks for it.

    They go on without a rank that is lost where `[recovery]` says so.
    """
    if joined_world() is None and Plan.parse(task.plan).compile:
        from plait.launcher.agent import start_server

        start_server("torch._dynamo")  # once, and not in every rank
    if task.config.train.restarts:
        start = launched if joined_world() is not None else _coming_and_going
        return start(task, num_ranks)
    if joined_world() is not None:
        return launch(job.run, task, None, True, nproc=num_ranks)[0]
    from plait.launcher.keeper import keep
    from plait.launcher.seat import LaunchPlan
    from plait.run import kept

    policy = replanning.policy(task.config, Plan.parse(task.plan))
    try:
        with task.supervision.outside() as watcher:
            if watcher is not None:
                policy = replace(policy, why_ended=watcher.why_ended)
            ended = keep(kept.run, (task,), LaunchPlan(task.plan, num_ranks), policy)
            result: Json = ended.results[0]
            return result
    finally:
        show_cursor()


def show_cursor() -> None:
    """Show a terminal's cursor again."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")


def view(result: Json) -> str:
    """The numbers for people."""
    traffic = (
        ", ".join(f"{axis} {sent / 1e6:,.1f} MB" for axis, sent in result["traffic"].items())
        or "none"
    )
    here = result["steps_here"]
    skipped = result.get("skipped_steps")
    ms = (result["step_seconds_median"] or 0) * 1e3
    lines = [
        f"plan          {result['plan']}",
        *([f"remat         {remat_text(result['remat'])}"] if "remat" in result else []),
        *([f"kept whole    {kept_text(kept)}"] if (kept := result.get("keep_gathered")) else []),
        f"steps         {result['steps']}"
        + ("" if here == result["steps"] else f", the last {here} here")
        + (f", of which {skipped} changed nothing: no finite gradient" if skipped else ""),
        f"final loss    "
        f"{'-' if result['final_loss'] is None else format(result['final_loss'], '.4f')}",
        f"speed         {result['tokens_per_second']:,.0f} {result['unit']}/s (mean), "
        f"{ms:,.1f} ms a step (median)",
        f"peak memory   {max(result['peak_memory']) / 1e6:,.0f} MB in the fullest rank",
        f"traffic       {traffic} sent by a rank in a step",
        f"written to    {result['out']}",
    ]
    return "\n".join(lines)
