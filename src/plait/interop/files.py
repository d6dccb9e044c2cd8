"""Files of other frameworks: JSON, YAML, TOML, or a shell script with a command line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from plait.errors import ConfigError
from plait.toml import NOT_READABLE, files_near, parse_json
from plait.values import JsonObject, JsonValue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_BYTES: Final = 4_000_000
"""A config above this size is some other file."""


def read_text(path: Path) -> str:
    """The text of a file. Errors: `ConfigError` naming the file."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, which is no config")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; {files_near(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory, not a config") from None
    except PermissionError:
        raise ConfigError(f"{path}: {NOT_READABLE}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None


def parse(text: str, form: str) -> JsonObject:
    """The table of a text in one form: `json`, `yaml`, `toml` or `shell`.

    Errors: `ConfigError` with the parser's words.
    """
    if form == "shell":
        return command_line(text)
    readers: dict[str, Callable[[str], Any]] = {
        "json": parse_json,
        "yaml": _yaml,
        "toml": tomllib.loads,
    }
    try:
        value = readers[form](text)
    except RecursionError:
        raise ConfigError("tables are nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"this is not valid {form.upper()}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"this {form.upper()} is a {type(value).__name__}, not a table of keys")
    return value


def form_of(path: Path, text: str) -> str:
    """The form of a file, by its suffix, else by its first words."""
    by_suffix = {
        ".json": "json",
        ".yaml": "yaml",
        ".yml": "yaml",
        ".toml": "toml",
        ".sh": "shell",
        ".args": "shell",
    }
    if path.suffix.lower() in by_suffix:
        return by_suffix[path.suffix.lower()]
    if text.lstrip().startswith("{"):
        return "json"
    if re.search(r"(^|\s)--[a-z]", text):
        return "shell"
    return "toml" if re.search(r"^\s*\[[\w.]+\]\s*$", text, re.MULTILINE) else "yaml"


def _yaml(text: str) -> JsonValue:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "a YAML file needs the package pyyaml: pip install 'plait[import]'"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


_ASSIGNMENT: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_OPTION: Final = re.compile(r"--[A-Za-z][\w.-]*(=.*)?$", re.DOTALL)
_ARRAY: Final = re.compile(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(")
_ONE_WORD: Final = re.compile(r"\$\(\(.*\)\)|[\"']?\S*[\"']?")
_QUOTED_OPTIONS: Final = re.compile(r"(?=.*\s)(.*\s)?--[A-Za-z]", re.DOTALL)
_END: Final = "\n"
"""The word that ends a command."""
_MAX_EXPANSIONS: Final = 8


def command_line(text: str) -> JsonObject:
    """The options of a shell script or a command line: `--name value ...` as {name: value}.

    Variables that the script sets are put in. An option without a value is True, several values are
    a list. An option given twice keeps its last value, as argparse does. A command ends with its
    line. An array or a quoted text ends with its last mark. What follows is no value.
    """
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    variables: dict[str, str] = {}
    words: list[str] = []
    bares = [_without_comment(line) for line in lines]
    is_script = not "".join(bares).lstrip().startswith("--")
    mark = ""
    for bare in bares:
        assigned = _ASSIGNMENT.match(bare)
        value = assigned.group(2).strip() if assigned else ""
        if assigned and "--" not in value and _ONE_WORD.fullmatch(value):
            variables[assigned.group(1)] = _expanded(value.strip("\"'"), variables)
            continue
        mark = _mark_after(bare, mark)
        said = re.sub(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(?", " ", bare)
        words += _split(_expanded(said, variables))
        if is_script and not mark:
            words.append(_END)
    options: JsonObject = {}
    ranks = re.search(r"^\s*#\s*WORLD_SIZE=(\d+)", text, re.MULTILINE)
    if ranks:
        variables["WORLD_SIZE"] = ranks.group(1)
    if "WORLD_SIZE" in variables:
        options["WORLD_SIZE"] = variables["WORLD_SIZE"]
    return {**options, **_options(words)}


def _options(words: list[str]) -> JsonObject:
    """Each option with the words between it and the next one, or the end of its command."""
    options: JsonObject = {}
    index = 0
    while index < len(words):
        word = words[index].strip("()\"'")
        index += 1
        if not _OPTION.match(word):
            continue
        name, equals, joined = word[2:].partition("=")
        values = [joined] if equals else []
        while not equals and index < len(words) and words[index] != _END:
            value = words[index].strip("()\"'")
            if _OPTION.match(value):
                break
            values += [value] if value else []
            index += 1
        options[name.replace("_", "-")] = _value(values)
    return options


def _mark_after(line: str, mark: str) -> str:
    """The mark of an array or a quoted text that is still open after a line: `(`, a quote, or
    nothing. `mark` is the one that was open before it.
    """
    if not mark:
        opened = _ARRAY.match(line)
        mark = "(" if opened else ""
        line = line[opened.end() :] if opened else line
    if mark == "(":
        return "" if line.count(")") > line.count("(") else "("
    quotes = [quote for quote in "\"'" if line.count(quote) % 2]
    if mark:
        return "" if mark in quotes else mark
    return quotes[0] if quotes else ""


def _value(values: list[str]) -> JsonValue:
    stops = ("pretrain", "python", "torchrun", "&", "|", ";", ">", "2>&1")
    unquoted: list[str] = []
    for value in values:
        if value.endswith(".py") or value.startswith(stops):
            break
        unquoted.append(value)
    if not unquoted:
        return True
    return unquoted[0] if len(unquoted) == 1 else unquoted


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _expanded(text: str, variables: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        return variables.get(name, match.group(2) or match.group(0))

    for _ in range(_MAX_EXPANSIONS):
        again = _VARIABLE.sub(put, text)
        product = re.fullmatch(r"\$\(\((\d+)\s*\*\s*(\d+)\)\)", again)
        again = str(int(product.group(1)) * int(product.group(2))) if product else again
        if again == text:
            break
        text = again
    return text


def _split(text: str) -> list[str]:
    """The words of a line. A quoted text that holds options is words too."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that ends on another line
        return text.replace('"', " ").replace("'", " ").split()
    return [
        part for word in words for part in (word.split() if _QUOTED_OPTIONS.match(word) else [word])
    ]
