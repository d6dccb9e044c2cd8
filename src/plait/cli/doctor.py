"""`plait doctor`: what hangs, lags or broke in a run, of its folder alone."""

from __future__ import annotations

import argparse

from plait.cli import common
from plait.cli.answer import Answer, Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait doctor`."""
    common.add_run(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Read the findings. Errors: `ConfigError` for a folder that is no run's."""
    from plait.run.health import findings_of

    result = findings_of(common.run_folder(arguments.folder))
    return Answer(result, view(result))


def view(result: Json) -> str:
    """The findings for people, and what the ranks do."""
    from plait.doctor.findings import text_of

    lines = [f"{result['run']}: {result['state']}"]
    lines += [text_of(finding) for finding in result["findings"]]
    lines += [_error_line(error) for error in result["errors"]]
    if len(lines) == 1:
        lines.append(_all_clear(result))
    lines += [rank_line(rank) for rank in result["ranks"]]
    lines += [
        f"rank {rank}  no record is here: it has not begun, or its files are on another machine"
        for rank in result["ranks_without_record"]
    ]
    return "\n".join(lines)


def _error_line(error: Json) -> str:
    """The error that ended a rank, in words."""
    what = error["error"]
    return f"error: rank {error['rank']} after step {error['step']}: {what}"


def _all_clear(result: Json) -> str:
    """The words where no fault is known."""
    if result["state"] != "ended":
        return "nothing is wrong"
    where = f"step {result['step']} of {result['steps'] or '-'}"
    return f"no rank left an error; the run stopped after {where}"


def rank_line(rank: Json) -> str:
    """One rank in words."""
    words = f"rank {rank['rank']}  step {rank['step']}, {rank['doing']}"
    if rank["alive"] is None:
        return f"{words} (on {rank['host'] or 'another machine'}: ask there whether it runs)"
    if not rank["alive"]:
        return f"{words} (gone)"
    return f"{words} for {rank['seconds']:.1f} s (process {rank['pid']})"
