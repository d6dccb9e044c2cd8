"""`plait evaluate`: loss, perplexity and accuracy of a run, or of a config's initial weights."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.block_choices import with_kept
from plait.cli.parser import UsageError
from plait.launcher import launch
from plait.launcher.main_process import is_main_process, say

if TYPE_CHECKING:
    from plait.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait evaluate`."""
    parser.add_argument(
        "config",
        metavar="CONFIG|RUN_DIR",
        help="a TOML file (its initial weights), a run's folder, one of its checkpoints, or latest",
    )
    parser.add_argument(
        "--plan",
        metavar="TEXT",
        help="how to split the model (default: the run's or the config's plan)",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start")
    parser.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="evaluate this many batches (default: [eval] batches, else all)",
    )
    parser.add_argument(
        "--best", action="store_true", help="the best weights of the run, not the newest"
    )
    common.add_overrides(parser, "eval.batches=8")


def run(arguments: argparse.Namespace) -> Answer:
    """Evaluate. Errors: those of the config, the plan and the checkpoint before ranks start.

    Raises:
        UsageError: fewer batches than one.
    """
    from plait.run import evaluating

    if arguments.batches is not None and arguments.batches < 1:
        raise UsageError(f"--batches is {arguments.batches}; an evaluation has 1 or more")
    config, text, checkpoint = _source(arguments)
    config = with_kept(config, None)  # a forward alone keeps nothing
    plan = common.plan_of(config, text, arguments.nproc)
    plan = replace(plan, remat="none")
    job = evaluating.EvaluateJob(config, str(plan), checkpoint, arguments.batches)
    start = "initial weights" if checkpoint is None else str(checkpoint)
    if is_main_process():
        say(f"plait evaluate: {plan} on {common.ranks(plan)}, {start}")
    result = launch(evaluating.run, job, nproc=plan.world_size)[0]
    return Answer(result, view(result)) if is_main_process() else Answer(None)


def _source(arguments: argparse.Namespace) -> tuple[Config, str | None, Path | None]:
    """The config, the text of the plan (None: the config's) and the checkpoint."""
    from plait.checkpoint import resolve
    from plait.checkpoint.folder import LATEST
    from plait.config import load
    from plait.run.rundir import RunFolder, is_word, latest_run

    path = Path(arguments.config)
    path = latest_run() if is_word(path, LATEST) else path
    if not path.is_dir():
        if arguments.best and not path.exists():
            raise UsageError(f"{path} does not exist; --best needs the folder of a run")
        if arguments.best:
            raise UsageError("--best belongs to a run's folder; a config has initial weights alone")
        return load(arguments.config, arguments.overrides), arguments.plan, None
    folder = RunFolder(path)
    checkpoint = folder.best if arguments.best else resolve(path)
    if arguments.best and not checkpoint.is_dir():
        raise UsageError(f"{path} has no best weights; train it with eval.keep_best = true")
    if not folder.config.is_file():
        folder = RunFolder.of(checkpoint)
    if not folder.config.is_file():
        raise UsageError(
            f"{path} has no config.toml; name a run's folder or one of its checkpoints"
        )
    text = arguments.plan
    if text is None and folder.plan.is_file():
        text = folder.plan.read_text(encoding="utf-8").strip()
    return load(str(folder.config), arguments.overrides), text, checkpoint


def view(result: Json) -> str:
    """The numbers for people."""
    lines = [f"loss          {_number(result['loss'])}"]
    if result["perplexity"] is not None:
        lines.append(f"perplexity    {_number(result['perplexity'])}")
    if result["accuracy"] is not None:
        lines.append(f"accuracy      {result['accuracy']:.2%}")
    lines.append(f"samples       {result['samples']:,}")
    lines.append(f"step          {result['step']}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
