"""`plait launch`: the script that starts a config on a cluster, commented and ready to hand in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.answer import Answer
from plait.cli.parser import UsageError
from plait.errors import WorldSizeError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.config import Config
    from plait.jobs import JobScript

TARGET_NAMES = "slurm|kubernetes|torchrun|skypilot|ray"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait launch`."""
    common.add_config(parser)
    parser.add_argument(
        "--for",
        dest="target",
        metavar="NAME",
        required=True,
        help=f"the system that starts it: {TARGET_NAMES.replace('|', ', ')}",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default: 1)")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="M",
        help="ranks on each machine, one for each GPU (default: what the plan needs)",
    )
    parser.add_argument(
        "--plan", metavar="TEXT", help="the plan, or auto (default: the config's plan)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="ask for no GPUs; ranks run on processors"
    )
    parser.add_argument(
        "--hours", type=int, default=24, metavar="H", help="time limit in hours (default: 24)"
    )
    parser.add_argument("--image", metavar="NAME", help="the container image (kubernetes)")
    parser.add_argument(
        "--run-folder",
        metavar="DIR",
        help="the run's folder (default: runs/<config>, or one in the volume or bucket)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the script there (default: stdout)"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Write the script. Errors: those of the config and the plan, `WorldSizeError` where the ranks
    are not those that the plan needs.

    Raises:
        UsageError: a number below 1.
    """
    from plait.jobs import TrainJob, script_for
    from plait.jobs.api import target_of

    target_of(arguments.target)
    config = common.read_config(arguments, with_steps=False)
    for option in ("nodes", "gpus", "hours"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option} is {value}; it must be 1 or more")
    nodes, ranks_per_node, plan = _ranks(config, arguments)
    job = TrainJob(
        config=arguments.config,
        out=arguments.run_folder,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        plan=plan if arguments.plan is not None else None,
        overrides=tuple(arguments.overrides),
        gpus=not arguments.cpu,
        deadline_seconds=round(config.recovery.deadline_seconds),
        hours=arguments.hours,
        **({} if arguments.image is None else {"image": arguments.image}),
    )
    script = script_for(arguments.target, job, config.to_toml())
    if arguments.out is not None:
        _write(arguments.out, script.text)
    out = None if arguments.out is None else str(arguments.out)
    return Answer({**script.as_dict(), "plan": plan, "out": out}, view(script, arguments.out))


def _ranks(config: Config, arguments: argparse.Namespace) -> tuple[int, int, str]:
    """Machines, ranks of each, and the plan. `--gpus` may also count those of all machines."""
    from plait.jobs.job import counted

    text = arguments.plan if arguments.plan is not None else config.plan.text
    nodes = arguments.nodes or 1
    if text.strip() == "auto":
        if arguments.gpus is None:
            raise UsageError("the plan is auto; say how many ranks a machine has: --gpus M")
        return nodes, arguments.gpus, "auto"
    plan = common.plan_of(config, text)
    world = plan.world_size
    if arguments.gpus is None:
        if world % nodes:
            raise WorldSizeError(
                f"plan '{plan}' needs {world} ranks, which {counted(nodes, 'node')} cannot share"
            )
        return nodes, world // nodes, str(plan)
    if arguments.gpus * nodes == world:
        return nodes, arguments.gpus, str(plan)
    if arguments.gpus == world and world % nodes == 0:
        return nodes, world // nodes, str(plan)
    raise WorldSizeError(
        f"plan '{plan}' needs {counted(world, 'rank')}; {counted(nodes, 'node')} with "
        f"{counted(arguments.gpus, 'GPU')} make {nodes * arguments.gpus}; change --nodes, "
        "--gpus or the plan"
    )


def view(script: JobScript, out: Path | None) -> RenderableType:
    """The script alone, so that it can be piped; or where it was written and how it is handed
    in.
    """
    from rich.text import Text

    if out is None:
        return Text(script.text.rstrip("\n"))
    lines = [
        f"written to {out}",
        f"hand it in with: {script.submit.replace(script.file, str(out))}",
    ]
    lines += [f"note: {note}" for note in script.notes]
    return Text("\n".join(lines))


def _write(out: Path, text: str) -> None:
    common.check_writable(out)
    out.write_text(text, encoding="utf-8")
