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
LISTED = re.compile(r"^(?:Args|Attributes|Raises):\n((?:    .*\n?)+)", re.MULTILINE)
BEGINS = re.compile(r"    [`*\w.,/ ]+:(?: |$)")
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


def unindented(root: ast.Module) -> Iterator[str]:
    """Lines of a list that begin no entry and do not stand below one."""
    for node in nodes(root):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            for section in LISTED.findall(ast.get_docstring(node) or ""):
                for line in section.splitlines():
                    if line.strip() and not line.startswith("     ") and not BEGINS.match(line):
                        yield f"{node.lineno}: {node.name}: indent '{line.strip()}'"


@each_room
def test_what_continues_an_entry_stands_below_it(path: Path) -> None:
    wrong = list(unindented(tree(path)))
    assert not wrong, "\n".join(wrong)


def test_a_line_that_is_not_below_its_entry_is_seen() -> None:
    text = 'def call(one):\n    """Sum.\n\n    Args:\n        one: of\n        things.\n    """\n'
    assert list(unindented(ast.parse(text))) == ["1: call: indent 'things.'"]


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
