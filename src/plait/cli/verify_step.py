"""`plait verify --step`: a training step that plait knows nothing of, against one device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from plait.cli.answer import Answer
from plait.cli.parser import UsageError
from plait.launcher.main_process import is_main_process, say

if TYPE_CHECKING:
    from plait.verify.report import Report


def write_page(arguments: argparse.Namespace, report: Report) -> None:
    """Write the page of `--html`, where it is wanted."""
    if arguments.html is not None and is_main_process():
        from plait.verify.page import page

        arguments.html.write_text(page(report), encoding="utf-8")
        say(f"plait verify: {arguments.html}")


def run_step(arguments: argparse.Namespace) -> Answer:
    """The report on `FILE.py[:function]`; its errors, and those of the file.

    Raises:
        UsageError: an option that is for plans.
    """
    from plait.verify.outside.source import parse

    for name in ("config", "plan", "steps_after_resume", "resume_plan", "budget"):
        if getattr(arguments, name):
            word = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
            raise UsageError(f"--step checks a file's own training: leave {word} out")
    source = parse(arguments.step)
    nproc = 2 if arguments.nproc is None else arguments.nproc
    say(f"plait verify: {source.name} on {nproc} ranks, against one device")
    from plait.verify.outside.task import Trial
    from plait.verify.outside.trial import check

    trial = Trial(source, arguments.steps, arguments.dtype, arguments.tolerance)
    report = check(trial, nproc)
    write_page(arguments, report)
    return Answer(report.as_dict() if is_main_process() else None, report.text(), ok=report.ok)
