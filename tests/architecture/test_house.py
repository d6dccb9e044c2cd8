"""The house rules that a machine can check: every file says what it is, none is long, none points
to one machine.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.source import ROOT, each_room, module, nodes, tree

MAX_LINES = 400
MAX_COLUMNS = 100
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FOLDERS = ("src/plait", "tests", "benchmarks", "examples")
TEXTS = ("*.py", "*.md", "*.toml", "*.txt")
ONE_MACHINE = re.compile(
    r"(?<![\w.~])/(?:home|root|work|Users)/|--(?:extra-)?index-url|https?://[^\s)]*(?:\.local|\.internal|mirror)\b"
)


def _all(*patterns: str) -> list[Path]:
    tops = [path for pattern in TEXTS for path in ROOT.glob(pattern)]
    return tops + [
        path
        for folder in (*FOLDERS, "docs")
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
    ]


@each_room
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(tree(path))
    assert text, f"{path} has no docstring"
    assert len(text.split("\n\n")[0].splitlines()) <= 6, f"{path}: the opening is over six lines"


def test_no_python_file_is_long() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in _all("*.py")
        if p.suffix == ".py" and (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not long, (
        f"over {MAX_LINES} lines; look for the noun that wants a file of its own: {long}"
    )


@each_room
def test_no_line_is_wider_than_a_window(path: Path) -> None:
    wide = [
        f"{number}: {len(line)} columns"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not wide, f"{path.name}: {wide}"


@each_room
def test_a_comprehension_over_several_lines_holds_no_other(path: Path) -> None:
    nested = [
        node.lineno
        for node in nodes(tree(path))
        if isinstance(node, COMPREHENSIONS)
        and node.end_lineno != node.lineno
        and _num_comprehensions(node) > 1
    ]
    assert not nested, f"{path.name}: name the inner one, or write a loop, at lines {nested}"


def _num_comprehensions(node: ast.AST) -> int:
    return sum(isinstance(part, COMPREHENSIONS) for part in ast.walk(node))


def test_nothing_points_to_one_machine() -> None:
    for path in _all(*TEXTS):
        if path != Path(__file__):
            found = ONE_MACHINE.search(path.read_text())
            assert found is None, (
                f"{path.relative_to(ROOT)}: '{found[0]}' is of one machine" if found else ""
            )


PRIVATE = re.compile(
    r"torch\._C\._(?!distributed)|torch\.ops\.aten\._|ops\.mkldnn|\._cdata|_disable_current_modes"
    r"|_step_supports_amp_scaling"
)


@each_room
def test_private_functions_of_torch_are_used_in_one_file(path: Path) -> None:
    if module(path) != "plait.torch_internals":
        found = PRIVATE.search(path.read_text())
        assert found is None, f"{found[0]} belongs into torch_internals.py" if found else ""


@each_room
def test_patterns_of_names_are_read_in_one_file(path: Path) -> None:
    if module(path) != "plait.patterns":
        assert "re.escape(pattern)" not in path.read_text(), "use plait.patterns"
