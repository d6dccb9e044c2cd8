"""Commands in documents name modules, files and options that exist, in blocks and between words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.cli import table
from plait.cli.parser import Parser
from tests.architecture.source import ROOT, documents

BLOCK = re.compile(r"^```[^\n]*\n.*?^```$", re.M | re.S)
COMMANDS_OF = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SCRIPT = re.compile(r"\bpython (?:-m ((?:benchmarks|tests|atlas)[\w.]*)|([a-z_]+/[a-z_/]+\.py))")
COMMON = {"--json", "--debug", "--help"}


def commands(path: Path) -> list[str]:
    """The lines of blocks of commands, and code between words."""
    text = path.read_text(encoding="utf-8")
    lines = [line for block in COMMANDS_OF.findall(text) for line in block.splitlines()]
    return lines + [" ".join(code.split()) for code in INLINE.findall(BLOCK.sub("", text))]


def source_of(module: str, file: str) -> str | None:
    """The text of a script, with that of its package; None where there is no such script."""
    place = ROOT / (file or module.replace(".", "/"))
    if place.is_dir():
        paths = [place / "__main__.py"]
    else:
        paths = [place if file else place.with_suffix(".py")]
    if not all(path.is_file() for path in paths):
        return None
    paths += paths[0].parent.glob("*.py")
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def wrong(command: str) -> list[str]:
    """What a command names that does not exist."""
    script = SCRIPT.search(command)
    if script:
        text = source_of(*(part or "" for part in script.groups()))
        if text is None:
            return [script[0]]
        options = OPTION.findall(command[script.end() :])
        return [one for one in options if f'"{one}"' not in text and one not in COMMON]
    verb = re.match(r"plait ([a-z]+)\b", command)
    if verb and verb[1] in table.VERBS:
        parser = Parser(f"plait {verb[1]}", "")
        table.load(verb[1]).add_arguments(parser)
        known = {*parser._option_string_actions, *COMMON}
        return [one for one in OPTION.findall(command) if one not in known]
    return [command] if verb else []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_names_commands_that_exist(path: Path) -> None:
    faults = {command: wrong(command) for command in commands(path) if wrong(command)}
    assert not faults, faults


def test_a_command_that_does_not_exist_is_seen() -> None:
    assert wrong("python -m benchmarks.newcomer.bench --installed") == []
    assert wrong("python -m benchmarks.newcomer.bench --instaled") == ["--instaled"]
    assert wrong("python -m benchmarks.newcomer.bensh") == ["python -m benchmarks.newcomer.bensh"]
    assert wrong("plait train CONFIG --plan TEXT") == []
    assert wrong("plait train CONFIG --plann TEXT") == ["--plann"]
    assert wrong("plait trane CONFIG") == ["plait trane CONFIG"]
