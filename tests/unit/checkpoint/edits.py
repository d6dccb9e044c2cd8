"""Changes to a saved checkpoint by hand, with every checksum repaired."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.checkpoint.folder import INDEX, write_index

VALUES: tuple[Any, ...] = (
    *(-1, -5, 0, 1, 10**12, 10**40, 0.5, 1e300, float("nan"), True, None, ""),
    *("int8", "float32", "../x", [], [0], [-1], [1, 1], [10**9, 10**9], {}, {"step": 1}),
)


def edit_index(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change `checkpoint.json` in place, and repair its checksum."""
    index = json.loads((checkpoint / INDEX).read_text())
    del index["format"], index["checksum"]
    change(index)
    write_index(checkpoint, index)


def edit_header(checkpoint: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the metadata of a file's header, and repair its checksum in the index."""
    index = json.loads((checkpoint / INDEX).read_text())
    path = checkpoint / index["files"][number]["name"]
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header["__metadata__"])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + whole[end:])

    def repair(index: dict[str, Any]) -> None:
        index["files"][number]["checksum"] = zlib.crc32(head)
        index["files"][number]["size_bytes"] = len(head) + len(whole) - end

    edit_index(checkpoint, repair)


def strip_tokens(checkpoint: Path) -> None:
    """Make it as it was before saves had a token."""
    num_files = len(json.loads((checkpoint / INDEX).read_text())["files"])
    for number in range(num_files):
        edit_header(checkpoint, number, lambda metadata: metadata.pop("save"))

    def strip(index: dict[str, Any]) -> None:
        del index["save"]
        for file in index["files"]:
            del file["pieces"]

    edit_index(checkpoint, strip)


def random_edit(seed: int) -> Callable[[dict[str, Any]], None]:
    """A change of one random place in an index: another value, a missing key, two swapped."""

    def change(index: dict[str, Any]) -> None:
        draw = random.Random(seed)
        places = list(_places(index))
        holder, key = draw.choice(places)
        kind = draw.choice(("value", "value", "value", "remove", "near", "swap"))
        if kind == "remove":
            del holder[key]
        elif kind == "near" and isinstance(holder[key], int):
            holder[key] += draw.choice((-1, 1))
        elif kind == "swap":
            other, name = draw.choice(places)
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = draw.choice(VALUES)

    return change


def _places(node: Any) -> Any:
    """Every (holder, key) in a tree."""
    if isinstance(node, (dict, list)):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from _places(node[key])
