"""Single TOML values, as `--set` and overrides give them; files are tested through those who read
them.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.toml import parse_value, tomllib, write_toml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("'7'", "7"),
        ('"a b"', "a b"),
        ("{a = 1}", {"a": 1}),
        ("adamw", "adamw"),
        ("dp2:zero3 mb4", "dp2:zero3 mb4"),
        ("True", "True"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("0.9, 0.95", "0.9, 0.95"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_written_tables_read_back() -> None:
    table: dict[str, Any] = {
        "text": 'a "b" \\ \n ü \x7f',
        "numbers": [1, 2.5, 1e-30, -3, True],
        "inner table": {"a b": {"c": []}, "d.e": "f"},
        "float": 3.0,
    }
    assert tomllib.loads(write_toml({"one": table, "two": {}})) == {"one": table, "two": {}}
    assert write_toml({"one": {"gone": None, "list": ({"x": None},)}}) == "[one]\nlist = [{}]\n"
