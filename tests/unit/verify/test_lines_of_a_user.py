"""The lines that a user of each framework writes for `plait verify --step`: at most ten."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "parity" / "outside"
INTERFACE = ("make", "prepare", "train_step", "train")
MOST = 10


def rows() -> list[tuple[str, str, int]]:
    """(framework, example, lines) of the table in docs/verify.md."""
    found = []
    for line in (ROOT / "docs" / "verify.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1].isdecimal():
            found.append((cells[0], cells[2].strip("`"), int(cells[-1])))
    return found


def lines_for_verify(path: Path) -> int:
    """The lines that a script lacks: a head and a result for each function, and the unpacking of
    what `prepare` returns; and lines that are marked so.
    """
    source = path.read_text(encoding="utf-8")
    bound = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            bound.add(node.name)
    functions = bound & set(INTERFACE)
    return 2 * len(functions) + ("prepare" in functions) + source.count("# for verify")


def test_the_table_has_every_framework() -> None:
    assert len(rows()) >= 7


@pytest.mark.parametrize(("framework", "example", "lines"), rows())
def test_a_user_writes_at_most_ten_lines(framework: str, example: str, lines: int) -> None:
    assert lines_for_verify(FOLDER / example) == lines <= MOST, framework
