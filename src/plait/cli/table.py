"""Verb -> what it does. The module of a verb is `plait.cli.<verb>` or that of `MODULES`, imported
only when the verb is called.

Such a module has `add_arguments(parser)` and `run(arguments) -> Answer`.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

from plait.cli.answer import Answer
from plait.cli.parser import UsageError
from plait.errors import nearest

VERBS = {
    "train": "train a model under a plan",
    "verify": "prove that a plan computes what one device computes",
    "evaluate": "evaluate a run, or the initial weights of a config",
    "compare": "run several plans and set their numbers side by side",
    "plan": "choose the plan for a model and a cluster",
    "estimate": "predict time, memory and traffic of one plan",
    "explore": "serve a page on which plans are compared",
    "explain": "show one strategy step by step, with the numbers of a small run",
    "schedule": "print a pipeline schedule as a grid, with its bubble and memory",
    "calibrate": "fit the planner to runs of your own, and write a cluster file",
    "probe": "measure this machine: matrix rate, memory, links",
    "report": "turn the folder of a run into one page",
    "doctor": "say what hangs, lags or broke in a run",
    "status": "say how far a run is, how fast, on which ranks",
    "export": "write a plan or a checkpoint for other frameworks",
    "import": "turn the config of another framework into a plan and a config",
    "launch": "write the script that starts a config on a cluster",
    "federated": "train over clients that keep their data",
    "roles": "print the table by which a model's layers are split, and its cost",
    "config": "list every key of a config, print its JSON schema, or a config to begin with",
}


COMPLETION = "print a script by which the shell completes verbs and options"

MODULES = {"import": "imported"}
"""The modules of verbs whose name is no name of a module."""


class Verb(Protocol):
    """The module of one verb."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of this verb, beside `--json` and `--debug`, which all have."""

    def run(self, arguments: argparse.Namespace) -> Answer:
        """Do it; user errors are `PlaitError`."""


def load(verb: str) -> Verb:
    """The verb's module. Errors: `UsageError` for a word that is no verb."""
    if verb not in VERBS:
        raise UsageError(f"'{verb}' is not a verb of plait; {nearest(verb, VERBS)}")
    return cast("Verb", importlib.import_module(f"plait.cli.{MODULES.get(verb, verb)}"))
