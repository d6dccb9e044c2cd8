"""Entries of `Args` and `Attributes`: each on a line of its own, of a name that exists.

An editor shows them as a list. An entry inside the line of another is not seen there, and one of a
name that has gone misleads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import classes, each_room, nodes, tree

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"    (\w+(?:, \w+)*): ")
INSIDE = re.compile(r"[.;]\s+(\w+(?:, \w+)*): ")
Owner = ast.ClassDef | ast.FunctionDef


def entries(text: str) -> Iterator[tuple[str, bool]]:
    """(name, whether it begins its line) of the entries of a docstring, and what looks like one."""
    for section in SECTION.findall(text):
        for line in section.splitlines():
            if match := ENTRY.match(line):
                yield from ((name, True) for name in match[1].split(", "))
            yield from (
                (name, False) for names in INSIDE.findall(line) for name in names.split(", ")
            )


def names_of(owner: Owner, every: dict[str, ast.ClassDef]) -> set[str]:
    """The arguments of a function; of a class all names in it, and in those above it."""
    functions = [node for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)]
    known = {one.name for one in functions if one is not owner}
    for function in functions if isinstance(owner, ast.ClassDef) else [owner]:
        known |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    if isinstance(owner, ast.ClassDef):
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute):
                known.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        for base in owner.bases:
            above = every.get(ast.unparse(base).partition("[")[0])
            known |= set() if above is None or above is owner else names_of(above, every)
    return known


def wrong_entries(root: ast.Module, every: dict[str, ast.ClassDef]) -> Iterator[str]:
    """The entries of a module that name nothing, or hide in the line of another."""
    for node in nodes(root):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found = list(entries(ast.get_docstring(node) or ""))
            known = names_of(node, every) if found else set()
            for name, leads in found:
                if leads and name not in known:
                    yield f"{node.lineno}: {node.name} has no '{name}'"
                elif not leads and name in known:
                    yield f"{node.lineno}: {node.name}: begin a line for '{name}'"


@each_room
def test_entries_name_what_exists_one_a_line(path: Path) -> None:
    wrong = list(wrong_entries(tree(path), classes()))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("first: of all.\n        second: of all.", []),
        ("first: of all, which\n            others lack.", []),
        ("third: of all.", ["1: call has no 'third'"]),
        ("first: of all. second: of all.", ["1: call: begin a line for 'second'"]),
    ],
)
def test_wrong_entries_are_seen(line: str, wrong: list[str]) -> None:
    text = f'def call(first, second):\n    """Sum.\n\n    Args:\n        {line}\n    """\n'
    assert list(wrong_entries(ast.parse(text), {})) == wrong
