"""The errors that ended the ranks of a run, from their logs and flight records alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from plait.doctor.flight import Phase
from plait.doctor.record import RankSnapshot
from plait.run.logs import AGAIN, ENDED
from plait.run.rundir import RunFolder
from plait.values import JsonObject

TRACEBACK: Final = "Traceback (most recent call last):"
KILLED: Final = (
    "it was killed and left no error: by a signal, by the kernel when memory ran out (see dmesg), "
    "or by its launcher once another rank was lost"
)


def rank_errors(folder: RunFolder, gone: Iterable[RankSnapshot]) -> list[JsonObject]:
    """The `rank`, `step` and `error` of each rank that an error ended, in a run that stopped early.

    Where there is none, those of the ranks that were killed. Ranks that came to their end are left
    out.
    """
    views = [*gone]
    errors = {view.rank: error_in(folder.log(view.rank)) for view in views}
    if not any(errors.values()):
        errors = {view.rank: None if view.phase is Phase.DONE else KILLED for view in views}
    return [
        {"rank": view.rank, "step": view.last_step, "error": errors[view.rank]}
        for view in views
        if errors[view.rank] is not None
    ]


def error_in(log: Path) -> str | None:
    """The error at the end of a log since its rank has started; None where there is none."""
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return None
    marks = [number for number, line in enumerate(lines) if line in (AGAIN, ENDED)]
    if not marks or lines[marks[-1]] == AGAIN:
        return None
    after = lines[marks[-1] + 1 :]
    begins = [number for number, line in enumerate(after) if line == TRACEBACK]
    rest = after[begins[-1] + 1 :] if begins else after
    plain = [number for number, line in enumerate(rest) if not line.startswith(" ")]
    said = rest[plain[0] :] if plain else after[-1:]
    return "\n".join(said).strip() or None
