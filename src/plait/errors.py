"""The tree of errors.

Every error that a user can cause is a `PlaitError`. Its message names the thing, the numbers and
the cure. Its `exit_code` is what the command line returns (2: the input is bad; 1: the run or the
proof failed).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

WRITE_ELSEWHERE: Final = "name a place that you may write to"
"""The cure where a file or a folder cannot be written."""


class PlaitError(Exception):
    """The root: something that the user can act on."""

    exit_code = 2


class PlanError(PlaitError):
    """A plan text that cannot be read, or a plan that breaks one or more rules."""


class NotAvailable(PlanError):
    """A combination that a plan can say and that cannot run."""


class ConfigError(PlaitError):
    """A config file or key that is unknown, missing or of the wrong kind."""


class ClusterError(PlaitError):
    """A cluster preset or file that cannot be used."""


class ModelError(PlaitError):
    """A model that cannot be built, initialised or split as asked."""


class DataError(PlaitError):
    """Data that is missing, unreadable or does not fit the model."""


class OptimizerError(PlaitError):
    """An optimizer that cannot work under the plan."""


class ScheduleError(PlaitError):
    """A pipeline schedule that is wrong; the message prints its grid with the cell marked."""


class CheckpointError(PlaitError):
    """A checkpoint that is missing, damaged or of another model."""


class SaveFailed(CheckpointError):
    """A checkpoint that could not be written in mid-run: a full disk, a folder that is gone."""

    exit_code = 1


class WorldSizeError(PlaitError):
    """The number of ranks is not the number that the plan needs."""


class RunError(PlaitError):
    """A run that began well and failed: it cannot be cured by the input alone."""

    exit_code = 1


class RankFailed(RunError):
    """A rank died or stopped answering; the message says which."""


class OutOfMemory(RunError):
    """A rank asked for memory that is not there."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite."""


def some_of(words: Iterable[object], most: int = 3) -> str:
    """The first words, and how many more there are.

    >>> some_of("abcdef", 2), some_of("ab", 2)
    ('a, b and 4 more', 'a, b')
    """
    known = list(map(str, words))
    more = len(known) - most
    return ", ".join(known[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """The clause that names the nearest known word, or the known words when none is near.

    >>> nearest("zreo3", ["zero1", "zero3"])
    "did you mean 'zero3'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"
