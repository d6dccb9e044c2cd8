"""Files of other frameworks: JSON, YAML, TOML, or a shell script with a command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from plait.errors import ConfigError
from plait.interop.shell import command_line
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
        return path.read_text(encoding="utf-8-sig")
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
    readers: dict[str, Callable[[str], Any]] = {
        "shell": command_line,
        "json": parse_json,
        "yaml": _yaml,
        "toml": tomllib.loads,
    }
    try:
        value = readers[form](text)
    except RecursionError:
        raise ConfigError("tables are nested too deep") from None
    except ValueError as error:
        name = form if form == "shell" else form.upper()
        raise ConfigError(f"this is not valid {name}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"this {form.upper()} is a {type(value).__name__}, not a table of keys")
    return value


def form_of(path: Path, text: str) -> str:
    """The form of a file, by its suffix, else by its first words. Raises `ConfigError` for code."""
    by_suffix = {
        ".json": "json",
        ".yaml": "yaml",
        ".yml": "yaml",
        ".toml": "toml",
        ".sh": "shell",
        ".args": "shell",
    }
    if path.suffix.lower() == ".py":
        raise ConfigError(
            f"{path} is Python code, as a config of Colossal-AI is, and plait does not run it; "
            "name a JSON, YAML or TOML file, or a shell script"
        )
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
