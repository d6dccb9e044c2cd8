"""The command line: one file a verb, one door for all.

A verb computes an `Answer`; only `main` prints, chooses the exit code and turns errors into
messages. So `--json`, `--debug` and the exit codes mean the same everywhere. Nothing here imports
torch before a verb needs it.
"""

from __future__ import annotations

from plait.cli.answer import Answer
from plait.cli.entry import command, main

__all__ = ["Answer", "command", "main"]
