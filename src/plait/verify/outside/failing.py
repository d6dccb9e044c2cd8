"""Errors of a user's own functions, in one sentence each, with the line where they were raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed

from plait.errors import PlaitError

WAITED = ("timed out", "timeout")
LOST = ("connection closed by peer", "connection reset", "broken pipe", "socket closed")
LONGEST = 300
"""Characters of an error's own words that a sentence repeats."""


@contextmanager
def in_words(what: str, path: str, kind: type[PlaitError]) -> Iterator[None]:
    """Raise errors of what is done here as `kind`. `path` is the file of the functions, if any."""
    try:
        yield
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(_sentence(what, path, error)) from error


def _sentence(what: str, path: str, error: BaseException) -> str:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    place = _place(path, error)
    words = str(error).strip().split("\n", 1)[0][:LONGEST]
    told = words.lower()
    if any(one in told for one in WAITED) and torch.distributed.is_initialized():
        return (
            f"rank {rank} waited in {what} for another rank, in vain{place}: all ranks must call "
            f"the same collectives, in the same order ({words})"
        )
    if any(one in told for one in LOST):
        return f"rank {rank} lost another rank in {what}{place}: it failed or left ({words})"
    name = type(error).__name__
    return (
        f"{what} failed on rank {rank}{place}: {name}: {words}"
        if words
        else (f"{what} failed on rank {rank}{place}: {name}")
    )


def _place(path: str, error: BaseException) -> str:
    """` at FILE:LINE`: the last line of the user's file, or else of code that is no library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if path and one.filename == path]
    library = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
    own = own or [one for one in frames if not one.filename.startswith(library)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
