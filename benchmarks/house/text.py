"""Figures of the source text: sizes, packed lines, types left open, contracts, facts, import
circles.

Everything here is read from syntax trees; nothing of the package is imported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plait"
MAX_COLUMNS = 100
SCHEDULES = {
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipev",
    "pipedream",
    "2bw",
}
ZERO_STAGES = {"zero1", "zero2", "zero3"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@cache
def files() -> tuple[Path, ...]:
    """Every module of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(root: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a syntax tree, walked once for all that read it."""
    return tuple(ast.walk(root))


def module(path: Path) -> str:
    """The dotted name of a module: `plait.comm.axis`, and `plait.comm` for its `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def num_lines() -> int:
    """Lines of all modules."""
    return sum(len(path.read_text().splitlines()) for path in files())


def lines_over(columns: int = MAX_COLUMNS) -> int:
    """Lines that are longer than a reader's window."""
    return sum(len(line) > columns for path in files() for line in path.read_text().splitlines())


def num_any() -> int:
    """Uses of the type `Any`, without its imports."""
    return sum(_names_any(path) for path in files())


def _names_any(path: Path) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    imported = len(re.findall(r"^from typing import .*\bAny\b", path.read_text(), re.MULTILINE))
    named = sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)
    return named - imported


def tuple_assignments() -> int:
    """Statements that assign a tuple display to a tuple of targets."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for path in files()
        for node in nodes(tree(path))
    )


def nested_comprehensions() -> int:
    """Comprehensions over several lines that hold another one."""
    return sum(
        node.end_lineno != node.lineno and _holds_another(node)
        for path in files()
        for node in nodes(tree(path))
        if isinstance(node, COMPREHENSIONS)
    )


def _holds_another(comprehension: ast.expr) -> bool:
    inner = (node for node in ast.walk(comprehension) if isinstance(node, COMPREHENSIONS))
    return sum(1 for _ in inner) > 1


def class_names() -> dict[str, list[str]]:
    """Every class name, with the modules that define a class of that name."""
    names: dict[str, list[str]] = {}
    for path in files():
        for node in nodes(tree(path)):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(module(path))
    return names


def public_members(class_name: str, *, operations_only: bool = False) -> list[str]:
    """The public methods, properties and annotated fields of a class."""
    for path in files():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                return list(_members(node, operations_only))
    raise LookupError(class_name)


def _members(node: ast.ClassDef, operations_only: bool) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            decorators = {d.id for d in part.decorator_list if isinstance(d, ast.Name)}
            if not (operations_only and "property" in decorators):
                yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            name = part.target.id
            yield from [name] if not (operations_only or name.startswith("_")) else []


def names_in_build() -> list[str]:
    """The names of plait's classes that the file with the function `build` speaks of."""
    path = next(p for p in files() if module(p).endswith("engine.build"))
    classes = class_names()
    imported = {
        alias.asname or alias.name
        for node in nodes(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait")
        for alias in node.names
    }
    return sorted(name for name in imported if name in classes and not name.endswith("Error"))


def files_with_words(words: set[str]) -> list[str]:
    """Modules that hold one of the words as a string in code; docstrings and the words of a page
    of help do not count.
    """
    found = []
    for path in files():
        docstrings = set(_docstrings(tree(path)))
        for node in nodes(tree(path)):
            if isinstance(node, ast.Constant) and node not in docstrings and node.value in words:
                found.append(module(path))
                break
    return found


def _docstrings(root: ast.Module) -> Iterator[ast.Constant]:
    for node in nodes(root):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def import_circles() -> list[list[str]]:
    """Circles of modules inside one room, imports inside functions and for types included."""
    known = {module(path): path for path in files()}
    arrows = {name: set(_imports_of(path, name, known)) for name, path in known.items()}
    return [sorted(circle) for circle in _strongly_connected(arrows) if len(circle) > 1]


def _imports_of(path: Path, name: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports. A package that is asked for one of its modules is not
    counted: `from plait.a import b` is an arrow to `plait.a.b` where that is a module.
    """
    for node in nodes(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in known else node.module
                if target != name:
                    yield target
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def _strongly_connected(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm (SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = len(index)
        low[node] = index[node]
        stack.append(node)
        for other in sorted(arrows[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            cut = stack.index(node)
            groups.append(stack[cut:])
            del stack[cut:]

    for node in arrows:
        if node not in index:
            visit(node)
    return groups
