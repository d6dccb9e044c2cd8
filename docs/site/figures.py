"""The rows of a measured table that belong to a strategy, as its page on the site shows them."""

from __future__ import annotations

import re
from pathlib import Path

from plait.errors import ConfigError
from plait.toml import read_toml

ROOT = Path(__file__).parents[2]


def tables() -> dict[str, list[dict[str, str]]]:
    """Name of a strategy -> its tables: `file`, `heading`, and `rows`, a pattern of whole lines."""
    found: dict[str, list[dict[str, str]]] = {}
    for entry in read_toml(Path(__file__).with_name("figures.toml"), ConfigError)["table"]:
        for name in entry["strategies"]:
            rows = entry["rows"].replace("TERM", re.escape(entry.get("terms", {}).get(name, name)))
            place = {"file": entry["file"], "heading": entry["heading"], "rows": rows}
            found.setdefault(name, []).append(place)
    return found


def figures(name: str) -> list[str]:
    """Lines of Markdown: each table of a strategy below the heading that it has in its document."""
    lines: list[str] = []
    for place in tables()[name]:
        heading, rows = table_of(ROOT / place["file"], place["heading"])
        chosen = [row for row in rows[2:] if re.search(place["rows"], row)]
        link = f"[`{place['file']}`](../../{place['file']})"
        lines += [f"{heading[:1].upper()}{heading[1:]}, from {link}:", "", *rows[:2], *chosen, ""]
    return lines


def table_of(path: Path, start: str) -> tuple[str, list[str]]:
    """A heading that begins so, and the first table below it."""
    below: list[str] = []
    heading = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            if below:
                break
            title = line.lstrip("# ")
            heading = title if title.startswith(start) else ""
        elif heading and line.startswith("|"):
            below.append(line)
        elif below:
            break
    if not below:
        raise ConfigError(f"{path.name} has no table below a heading that begins with {start!r}")
    return heading, below
