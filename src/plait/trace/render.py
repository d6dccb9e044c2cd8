"""A timeline as text: one line for each rank, one letter for its main action in each slot of time.

Text, because it shows in a terminal, in a test's failure and in a commit, where a picture does not.
"""

from __future__ import annotations

from plait.trace.records import Span
from plait.trace.timeline import Timeline


def render(timeline: Timeline, width: int = 100) -> str:
    """The lanes of the ranks, `width` slots wide. A slot shows the first letter of the kind that
    filled most of it, or `.`.

    A legend and the length of the whole in milliseconds follow.
    """
    spans = timeline.spans
    if not spans:
        return "(no spans)"
    start = min(span.start_seconds for span in spans)
    length = max(span.stop_seconds for span in spans) - start
    slot = (length or 1.0) / width
    letters = _letters(sorted({span.kind for span in spans}))
    ranks = sorted({span.rank for span in spans})
    margin = len(f"rank {ranks[-1]}")
    lines = []
    for rank in ranks:
        lane = _lane([span for span in spans if span.rank == rank], start, slot, width)
        lines.append(
            f"{f'rank {rank}':<{margin}} |" + "".join(letters.get(kind, ".") for kind in lane) + "|"
        )
    legend = "  ".join(f"{letter} {kind}" for kind, letter in letters.items())
    return "\n".join([*lines, f"{'':<{margin}}  {legend}  . idle   {length * 1e3:.2f} ms"])


def _letters(kinds: list[str]) -> dict[str, str]:
    """A letter for each kind: its first that is still free."""
    letters: dict[str, str] = {}
    for kind in kinds:
        spare = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        letters[kind] = next(
            c for c in (*kind.upper(), *spare) if c.isalnum() and c not in letters.values()
        )
    return letters


def _lane(spans: list[Span], start: float, slot: float, width: int) -> list[str]:
    """For each slot the kind that filled most of it, or the empty string when idle time did."""
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        first = max(0, int((span.start_seconds - start) / slot))
        last = min(width - 1, int((span.stop_seconds - start) / slot))
        for index in range(first, last + 1):
            left = start + index * slot
            right = start + (index + 1) * slot
            overlap = min(right, span.stop_seconds) - max(left, span.start_seconds)
            filled[index][span.kind] = filled[index].get(span.kind, 0.0) + max(0.0, overlap)
    return [
        max(slot_, key=lambda k: slot_[k]) if sum(slot_.values()) * 2 >= slot else ""
        for slot_ in filled
    ]
