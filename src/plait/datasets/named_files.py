"""The local files and the addresses that an object names, in itself and in its parts.

A stream does not list what it reads. Its parts do: arguments of generators, steps with their
functions, readers with their files. So the key of its tokens changes when one of the files does.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Final

MOST_PARTS: Final = 100_000
"""Parts that are looked at; a stream of rows in memory may have any number."""
LONGEST: Final = 4096
"""Letters of a path, which are those of Linux."""


def named_by(found: object) -> tuple[list[Path], list[str]]:
    """Files that exist, and addresses with `://`; each once, by name."""
    files: set[Path] = set()
    addresses: set[str] = set()
    for part in _parts(found):
        if "://" in part:
            addresses.add(part)
        elif _is_file(part):
            files.add(Path(part))
    return sorted(files), sorted(addresses)


def source_of(function: Callable[..., object]) -> list[Path]:
    """The file that a function is written in, where there is one."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return []
    return [] if file is None else [Path(file)]


def _is_file(text: str) -> bool:
    try:
        return bool(text) and "\n" not in text and Path(text).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _parts(found: object) -> Iterator[str]:
    """The short texts among the parts of an object, breadth first."""
    waiting = deque([found])
    seen: dict[int, object] = {}  # holds what it has seen, so that no number comes twice
    while waiting and len(seen) < MOST_PARTS:
        part = waiting.popleft()
        if isinstance(part, str | Path):
            if len(str(part)) <= LONGEST:
                yield str(part)
            continue
        if id(part) in seen or isinstance(part, ModuleType | type):
            continue
        seen[id(part)] = part
        waiting.extend(_inside(part))


def _inside(part: object) -> list[object]:
    """The parts of one part."""
    if isinstance(part, Mapping):
        return list(part.values())
    if isinstance(part, list | tuple | set | frozenset):
        return list(part)
    if isinstance(part, MethodType):
        return [part.__self__, part.__func__]
    if isinstance(part, functools.partial):
        return [part.func, part.args, part.keywords]
    if isinstance(part, FunctionType):
        contents = [held for cell in part.__closure__ or () for held in _contents(cell)]
        return [*contents, part.__defaults__, part.__kwdefaults__]
    return list(getattr(part, "__dict__", {}).values())


def _contents(cell: CellType) -> list[object]:
    """The value of a closure's cell; nothing where it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
