"""`plait config`: the reference of every key, from the sections themselves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plait.cli import main
from plait.cli.config import view
from plait.config.read import SECTIONS
from plait.config.schema import MODEL_SCHEMAS, SCHEMAS, json_schema, keys
from plait.toml import read_toml

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


def test_every_key_is_listed_once_with_a_type_and_a_meaning() -> None:
    listed = keys()
    names = [(key.section, key.model, key.key) for key in listed]
    assert len(set(names)) == len(names)
    wanted = {("model", name, key) for name, s in MODEL_SCHEMAS.items() for key in s.model_fields}
    wanted |= {(section, "", key) for section, s in SCHEMAS.items() for key in s.model_fields}
    assert set(names) == wanted
    assert {key.section for key in listed} == set(SECTIONS)
    assert [key for key in listed if not key.type or not key.meaning.endswith(".")] == []


def test_the_list_says_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["keys"]
    by_name = {(row["section"], row["key"]): row for row in rows}
    lr = by_name["train", "lr"]
    assert (lr["type"], lr["default"], lr["required"]) == ("number > 0", 1e-3, False)
    assert by_name["train", "optimizer"]["type"] == "adamw | sgd | muon | module:function"
    assert by_name["data", "files"]["type"] == "list of string"
    assert not by_name["model", "intermediate_size"]["required"]
    assert main(["config", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(row["key"] in out for row in rows)
    assert "1e+15" not in out


@pytest.mark.quick
def test_the_list_in_a_file_has_a_line_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    for line, key in zip(lines, keys(), strict=True):
        assert f"  {key.key}  " in f"{line}  " and line.endswith(key.meaning)


@pytest.mark.quick
def test_the_list_on_a_narrow_terminal_breaks_no_word() -> None:
    page = io.StringIO()
    Console(file=page, force_terminal=True, color_system=None, width=80).print(view(keys()))
    text = page.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for key in keys():
        assert key.key in words
        assert set(key.meaning.split()) <= set(words)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_knows_every_key_of_the_examples(path: Path) -> None:
    schema = json_schema()
    for section, table in read_toml(path, ValueError).items():  # type: ignore[arg-type]
        named: Any = schema["properties"][section]
        known: set[str] = set()
        for choice in named.get("anyOf", [named]):
            known |= set(schema["$defs"][choice["$ref"].split("/")[-1]]["properties"])
        assert table.keys() <= known


def test_the_schema_is_printed_and_one_of_both_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["required"] == ["model"]
    assert printed["$defs"]["Train"]["properties"]["lr"]["description"]
    assert "intermediate_size" not in printed["$defs"]["GPT"]["required"]
    assert main(["config"]) == 2
