"""`plait status`: how far a run is, how fast, on which ranks."""

from __future__ import annotations

import argparse

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.cli.doctor import rank_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait status`."""
    common.add_run(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Read the run. Errors: `ConfigError` for a folder that is no run's."""
    from plait.run.health import status_of

    result = status_of(common.run_folder(arguments.folder))
    return Answer(result, view(result))


def view(result: Json) -> str:
    """The status for people."""
    seconds = result["step_seconds"]
    speed = "-"
    if seconds is not None:
        rate = result["tokens_per_second"]
        speed = f"{rate:,.0f} {result['unit']}/s (mean), {seconds * 1e3:,.1f} ms a step (median)"
    saved = result["last_checkpoint"]
    loss = result["loss"]
    lines = [
        f"run           {result['run']}: {result['state']}",
        f"plan          {result['plan'] or '-'}",
        f"step          {result['step']} of {result['steps'] or '-'}",
        f"loss          {'-' if loss is None else format(loss, '.4f')}",
        f"speed         {speed}",
        f"checkpoint    {'-' if saved is None else saved['path']}",
        f"findings      {result['findings']}",
    ]
    return "\n".join([*lines, *(rank_line(rank) for rank in result["ranks"])])
