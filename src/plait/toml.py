"""TOML files, single TOML values and JSON texts, read with errors that name the file and the line.

It stands beside `errors` because both the cluster and the config room read such files. It is the
one place that knows which reader a Python version has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from plait.errors import PlaitError
from plait.values import JsonMapping, JsonObject, JsonValue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BESIDE = 1000
"""Files of a folder that are looked at for the one that was meant."""
FEW = 5
NOT_READABLE = "you may not read this file or its folder; ls -l shows who may, chmod u+r lets you"


def read_toml(path: str | Path, error: type[PlaitError]) -> JsonObject:
    """The tables of a TOML file; raises `error` for a file that is missing, unreadable or no TOML
    (with the line).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise error(f"{path}: there is no such file; {files_near(path)}") from None
    except IsADirectoryError:
        inside = files_near(path / f"{path.name}.toml")
        raise error(f"{path}: this is a directory, not a TOML file; {inside}") from None
    except PermissionError:
        raise error(f"{path}: {NOT_READABLE}") from None
    except (OSError, ValueError) as cause:  # ValueError: no text, or a path with a null character
        raise error(f"{path}: cannot be read as text: {cause}") from None
    return parse_toml(text, error, str(path))


def files_near(path: Path) -> str:
    """The clause that helps who named a file that is not there: the files beside it, of its kind.

    Its folder may be the one that is not there. Then the clause says from where it was looked for.
    """
    folder = path.parent
    try:
        beside = [one.name for one in islice(folder.iterdir(), MOST_BESIDE) if one.is_file()]
    except OSError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        return f"there is no folder {folder}{where} either"
    names = sorted(name for name in beside if name.endswith(path.suffix))
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean '{folder / close[0]}'?"
    if not names:
        return f"there is no {path.suffix} file in {folder.absolute()}".replace("  ", " ")
    return f"{folder}/ has {', '.join(names[:FEW])}{' ...' if len(names) > FEW else ''}"


def parse_toml(text: str, error: type[PlaitError], name: str) -> JsonObject:
    """The tables of a TOML text; raises `error`, which begins with `name`, for a text that is
    none.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{name}: {TOO_DEEP}") from None
    except ValueError as cause:  # no TOML, or a whole number of thousands of digits
        raise error(f"{name}: this is not valid TOML: {cause}") from None


TOO_DEEP = "tables and lists are nested too deep; a file of plait needs only a few levels"


def parse_json(text: str | bytes) -> JsonValue:
    """The value of a JSON text. Raises ValueError with a sentence for whatever is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def is_file(text: str) -> bool:
    """Whether a text names a file; no for one that is too long to be a path."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def is_folder(text: str) -> bool:
    """Whether a text names a folder; no for one that is too long to be a path."""
    try:
        return Path(text).is_dir()
    except OSError:
        return False


def parse_value(text: str) -> JsonValue:
    """The TOML value that a text spells, or the text itself when it spells none. So quotes may be
    left out.

    >>> parse_value("1e-3"), parse_value("[1, 2]"), parse_value("adamw"), parse_value("'7'")
    (0.001, [1, 2], 'adamw', '7')
    """
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, thousands of digits, thousands of brackets
        return text
    return tables["value"] if set(tables) == {"value"} else text


def write_toml(tables: Mapping[str, JsonMapping]) -> str:
    """One section a table, nested tables inline; the inverse of reading. None, which TOML does not
    have, is left out.
    """
    sections = []
    for name, table in tables.items():
        lines = [
            f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None
        ]
        sections.append("\n".join([f"[{_key(name)}]", *lines, ""]))
    return "\n".join(sections)


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _value(name)


def _value(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        items = [(key, inner) for key, inner in value.items() if inner is not None]
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(inner) for inner in value)}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
