"""The package read as text and syntax trees, for the laws about its shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plait"


@cache
def files() -> tuple[Path, ...]:
    """Every module of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def documents() -> tuple[Path, ...]:
    """Every document that is written for readers."""
    found = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    for folder in ("docs", "benchmarks", "examples"):
        found += (ROOT / folder).rglob("*.md")
    return tuple(sorted(found))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(), str(path))


def module(path: Path) -> str:
    """The dotted name of a module: `plait.comm.axis`, and `plait.comm` for its `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WINGS = {"parallel", "predict"}  # packages whose folders are rooms of their own


def room(name: str) -> str:
    """The room of a dotted name: `comm` for `plait.comm.axis`, `parallel.data` for
    `plait.parallel.data.zero`, the empty string for the door.
    """
    parts = name.split(".")
    if len(parts) > 2 and (parts[1] in WINGS or parts[1:3] == ["outer", "federated"]):
        return f"{parts[1]}.{parts[2]}"
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every import of a module, lazy ones and those for types included, as (dotted name, line).

    `from a import b` gives `a.b`: it may be a name of `a` or a module in it, and the room is the
    same.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
