"""Files of one JSON object a line, read after a crash: a damaged line costs no other one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from plait.values import JsonObject


@dataclass(frozen=True)
class JsonLine:
    """A line that is not empty: its number from 1, its bytes, its object.

    The object is None where the line is damaged.
    """

    number: int
    raw: bytes
    row: JsonObject | None


def read_lines(path: Path) -> list[JsonLine]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return [JsonLine(number, raw, _object(raw)) for number, raw in lines if raw.strip()]


def rows_of(path: Path) -> list[JsonObject]:
    """The objects of a file; damaged lines are left out."""
    return [line.row for line in read_lines(path) if line.row is not None]


def _object(raw: bytes) -> JsonObject | None:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):  # no JSON, or no text
        return None
    return row if isinstance(row, dict) else None
