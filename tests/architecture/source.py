"""The package read as text and syntax trees, for the laws about its shape."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from benchmarks.house.text import PACKAGE, ROOT, files, module, nodes, tree

__all__ = ["PACKAGE", "ROOT", "classes", "documents", "each_room", "files", "files_by_room"]
__all__ += ["imports", "module", "nodes", "room", "tree"]


@cache
def documents() -> tuple[Path, ...]:
    """Every document that is written for readers."""
    found = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    for folder in ("docs", "benchmarks", "examples"):
        found += (ROOT / folder).rglob("*.md")
    return tuple(sorted(found))


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
    for node in nodes(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def files_by_room() -> dict[str, list[Path]]:
    """The modules of each room; those of the package's top under the name `plait`."""
    rooms: dict[str, list[Path]] = {}
    for path in files():
        top = path.parent == PACKAGE
        rooms.setdefault("plait" if top else room(module(path)), []).append(path)
    return rooms


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of the package by its name, which one class has (`test_words`)."""
    every = (node for path in files() for node in nodes(tree(path)))
    return {node.name: node for node in every if isinstance(node, ast.ClassDef)}


def each_room(law: Callable[[Path], None]) -> Callable[[str], None]:
    """A test for each room from a law about one file: it names every file that breaks the law."""

    def test(name: str) -> None:
        broken = []
        for path in files_by_room()[name]:
            try:
                law(path)
            except AssertionError as failure:
                broken.append(f"{path.relative_to(PACKAGE)}: {failure}")
        assert not broken, "\n".join(broken)

    test.__name__, test.__doc__ = law.__name__, law.__doc__
    return pytest.mark.parametrize("name", files_by_room())(test)
