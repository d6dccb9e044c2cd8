"""Damage: the small wrongs that every kind of input is dealt, from one seeded generator."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from random import Random
from typing import Any

NUMBERS = (
    "-1", "0", "1", "2", "3", "8", "64", "1000", "100000", "999999999", "10000000000", "9" * 5000,
    "1.5", "1e9", "-0", "0x10", "nan", "inf", "-inf", "1e400", "²", "٣", "",
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\0", "é", "日本", "../..", "/", "/dev/null", "/proc/self/mem", "~", ".", "auto",
    "local", "%s", "{}", "{0}", "a=b", "--json", "-", "none", "true", "x" * 300, "x" * 100_000,
    "'", '"', "[", "]]", "{", "\\", ":", ",", "=", "\ud800", "²", "dp2", "cpu", "module:function",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 10**6, 10**12, 2**63, 10**400, -(10**400), 1.5, -0.5,
    1e308, float("nan"), float("inf"), "", "x", "1", "dp2", "²", [], [1], [[]], ["x", 2], {},
    {"x": 1}, [None], {"a": {"b": []}}, "x" * 5000,
)  # fmt: skip


def nested(depth: int, opening: str, closing: str) -> str:
    """Brackets within brackets."""
    return opening * depth + closing * depth


def damaged_bytes(random: Random, text: bytes) -> bytes:
    """One to three cuts, flips, copies or insertions."""
    result = bytearray(text)
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(result) + 1)
        length = random.choice((1, 1, 2, 10, 200))
        kind = random.choice(("cut", "drop", "flip", "insert", "copy", "empty"))
        if kind == "cut":
            del result[place:]
        elif kind == "drop":
            del result[place : place + length]
        elif kind == "flip" and place < len(result):
            result[place] ^= 1 << random.randrange(8)
        elif kind == "insert":
            result[place:place] = random.choice(TEXTS + NUMBERS)[:300].encode("utf-8", "replace")
        elif kind == "copy":
            result[place:place] = result[place : place + length]
        elif kind == "empty" and random.random() < 0.1:
            result.clear()
    return bytes(result)


def damaged_tree(random: Random, tree: Any) -> Any:
    """A copy of plain data in which some values are others, gone, or in another place."""
    whole = {"root": copy.deepcopy(tree)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        box, key = _place(random, whole)
        kind = random.choice(("value", "value", "value", "drop", "swap", "wrap"))
        if kind == "value":
            box[key] = copy.deepcopy(random.choice(VALUES))
        elif kind == "drop" and box is not whole:
            del box[key]
        elif kind == "swap":
            other, name = _place(random, whole)
            box[key] = copy.deepcopy(other[name])
        else:
            box[key] = [box[key]]
    return whole["root"]


def _place(random: Random, whole: dict[str, Any]) -> tuple[Any, Any]:
    """A random container in the tree and a key of it."""
    box: Any = whole
    while True:
        keys = list(box) if isinstance(box, dict) else list(range(len(box)))
        key = random.choice(keys)
        inner = box[key]
        if isinstance(inner, (dict, list)) and inner and random.random() < 0.85:
            box = inner
        else:
            return box, key


def toml(tables: Mapping[str, Any]) -> str:
    """Tables as TOML text, wrong values and all."""
    if not isinstance(tables, Mapping):
        return f"x = {_toml_value(tables)}\n"
    lines = [f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in tables.items() if not _table(v)]
    for name, table in tables.items():
        if _table(table):
            lines.append(f"[{json.dumps(str(name))}]")
            lines += [f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = (f"{json.dumps(str(key))} = {_toml_value(item)}" for key, item in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value if value is not None else "")
