"""The docstring of a public function names the errors that the function raises itself.

They are those of `plait.errors`, and what is derived of them: errors that a user can cause. Errors
of the functions that it calls are theirs to name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, classes, each_room, nodes, tree
from tests.architecture.test_shapes import overrides, public_functions


@cache
def errors() -> frozenset[str]:
    """The names of the errors that a user can cause."""
    known = {
        node.name for node in nodes(tree(PACKAGE / "errors.py")) if isinstance(node, ast.ClassDef)
    }
    derived = (
        one for one in classes().values() if {ast.unparse(base) for base in one.bases} & known
    )
    return frozenset(known | {one.name for one in derived})


def raised(function: ast.FunctionDef) -> Iterator[str]:
    """The names of the errors in the raise statements of a function, those of inner ones aside."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield ast.unparse(error).rpartition(".")[2]
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)


def unnamed(root: ast.Module) -> Iterator[str]:
    """The errors of a module's public functions that their docstrings do not name."""
    for owner, function in public_functions(root):
        text = ast.get_docstring(function) or ""
        if not text and owner is not None and overrides(owner, function.name):
            continue
        for error in sorted({one for one in raised(function) if one in errors()}):
            if error not in text:
                where = function.name if owner is None else f"{owner.name}.{function.name}"
                yield f"{function.lineno}: {where} raises {error}"


@each_room
def test_a_docstring_names_the_errors(path: Path) -> None:
    missing = list(unnamed(tree(path)))
    assert not missing, "say when they are raised:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("text", "missing"),
    [("Cut. Raises `PlanError`.", []), ("Cut.", ["1: cut raises PlanError"])],
)
def test_an_error_without_a_word_is_seen(text: str, missing: list[str]) -> None:
    call = f'def cut():\n    """{text}"""\n    if not 0:\n        raise PlanError("none")\n'
    assert list(unnamed(ast.parse(call))) == missing
