"""Docstrings that stand alone: an editor shows one without the sentence before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import files, module, tree

# A docstring that opens so leans on a sentence that the reader does not see.
LEANING = re.compile(
    r"(The same|The inverse|Of|That of|What|As|Those|These|It|Its|They|Their|Nobody|Who|Whom|Whose"
    r"|Here|There|And|But|Also|Until|Likewise|Again|Anew)\b"
)


def docstrings(root: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, and of every string below a field of a class."""
    for node in ast.walk(root):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for position, part in enumerate(node.body):
                text = _text_of(part)
                if text and (position == 0 or isinstance(node, (ast.ClassDef, ast.Module))):
                    yield part.lineno, text.strip()


def _text_of(statement: ast.stmt) -> str:
    """The string that is the whole statement; empty for any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else ""
    return ""


@pytest.mark.parametrize("path", files(), ids=module)
def test_a_docstring_stands_alone(path: Path) -> None:
    leaning = [
        f"{line}: {text[:60]}" for line, text in docstrings(tree(path)) if LEANING.match(text)
    ]
    assert not leaning, f"{path.name}: name the subject first:\n" + "\n".join(leaning)
