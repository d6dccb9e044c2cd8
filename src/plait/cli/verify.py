"""`plait verify`: the proof that a plan computes what one device computes. Exit code 1 when it does
not.
"""

from __future__ import annotations

import argparse

from plait.cli import common
from plait.cli.answer import Answer
from plait.launcher.speaking import say, speaks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait verify`."""
    common.add_config(parser)
    parser.add_argument(
        "--plan", required=True, metavar="TEXT", help="the plan to prove, as 'dp2:zero3 mb2'"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="K", help="updates that are compared (default: 3)"
    )
    parser.add_argument(
        "--dtype",
        default="float64",
        choices=("float64", "float32", "bf16"),
        help="what both compute in (default: float64); bf16: how far it drifts",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="the largest relative error that passes (default: by dtype)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The report of `plait.verify.run`; its errors, and those of the config and the plan."""
    config = common.read_config(arguments, with_steps=False)
    plan = common.plan_of(config, arguments.plan)
    say(f"plait verify: {plan} on {common.ranks(plan)}, against one device")
    from plait.verify.run import run as verify

    report = verify(
        config, plan, steps=arguments.steps, dtype=arguments.dtype, tolerance=arguments.tolerance
    )
    return (
        Answer(report.as_dict(), report.text(), ok=report.ok)
        if speaks()
        else Answer(None, ok=report.ok)
    )
