"""`plait verify`: the proof that a plan computes what one device computes. Exit code 1 when it does
not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer
from plait.cli.parser import UsageError
from plait.cli.recomputation import with_remat
from plait.cli.verify_all import resume_plans_of, run_all
from plait.cli.verify_step import run_step, write_page
from plait.launcher.main_process import is_main_process, say
from plait.plan.precisions import DRIFTING

if TYPE_CHECKING:
    from plait.verify.progress import Clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait verify`."""
    common.add_config(parser, optional=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--plan", metavar="TEXT", help="the plan to prove (default: [plan] of the config)"
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="prove several plans; together they use every axis that the model allows",
    )
    which.add_argument(
        "--step",
        metavar="FILE.py[:FUNCTION]",
        help="check a training step of any framework: make() and train_step(model, batch, loss)",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks of --step (default: 2)")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page that shows the errors of each module",
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="K", help="steps to compare (default: 3)"
    )
    parser.add_argument(
        "--steps-after-resume",
        type=int,
        default=0,
        metavar="N",
        help="then save, load, and compare N more steps",
    )
    parser.add_argument(
        "--resume-plan",
        action="append",
        default=[],
        metavar="TEXT",
        help="the plan that loads; may be repeated (default: the same plan, and dp1)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="start no check after this time; the exit code is about the checks that were done",
    )
    parser.add_argument(
        "--dtype",
        default="float64",
        choices=("float64", "float32", "bf16", "fp8", "float16"),
        help="the number type of both runs (default: float64); bf16 and fp8 show the drift",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="the largest relative error that passes (default: by dtype)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The report of `plait.verify.run`; its errors, and those of the config and the plan."""
    if arguments.html is not None and is_main_process():
        common.check_writable(arguments.html)
    if arguments.step is not None:
        return run_step(arguments)
    _check(arguments)
    if arguments.all:
        return run_all(arguments, clock_of(arguments))
    config = common.read_config(arguments, with_steps=False)
    plan = common.plan_of(config, arguments.plan)
    config = with_remat(config, plan)
    resume_plans = resume_plans_of(arguments, plan)
    for text in resume_plans:
        common.plan_of(config, text)
    say(f"plait verify: {plan} on {common.ranks(plan)}, against one device")
    from plait.verify.report import Report
    from plait.verify.run import run as verify

    report = verify(
        config,
        plan,
        steps=arguments.steps,
        dtype=arguments.dtype,
        tolerance=arguments.tolerance,
        steps_after_resume=arguments.steps_after_resume,
        resume_plans=resume_plans,
        clock=clock_of(arguments),
    )
    if isinstance(report, Report):
        write_page(arguments, report)
    return (
        Answer(report.as_dict(), report.text(), ok=report.ok)
        if is_main_process()
        else Answer(None, ok=report.ok)
    )


def clock_of(arguments: argparse.Namespace) -> Clock:
    """The clock of this command, which starts now."""
    from plait.verify.progress import Clock

    return Clock.of(arguments.budget, speaks=is_main_process())


def _check(arguments: argparse.Namespace) -> None:
    if arguments.config is None:
        raise UsageError("a CONFIG is needed, or --step FILE.py; see plait verify --help")
    if arguments.nproc is not None:
        raise UsageError("--nproc belongs to --step: a plan says itself how many ranks it has")
    budget = arguments.budget
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise UsageError(f"--budget {budget:g}: a number of seconds above 0 is needed")
    tolerance = arguments.tolerance
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise UsageError(f"--tolerance {tolerance:g}: a number above 0 is needed, as 1e-10")
    if arguments.html is not None and (arguments.all or arguments.dtype in DRIFTING):
        raise UsageError(
            f"--html shows one proof of equality: leave --all and --dtype {arguments.dtype} out"
        )
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: at least one step is needed")
    if arguments.steps_after_resume < 0:
        raise UsageError(f"--steps-after-resume {arguments.steps_after_resume}: 0 or more")
    if arguments.resume_plan and not arguments.steps_after_resume:
        raise UsageError("--resume-plan needs --steps-after-resume N: how many steps follow it")
    if arguments.dtype == "float16":
        raise UsageError("--dtype float16 belongs to --step: a plan is proven in float64")
    if arguments.steps_after_resume and arguments.dtype in DRIFTING:
        raise UsageError("--steps-after-resume needs --dtype float64 or float32")
