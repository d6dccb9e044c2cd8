"""Shapes in the docstring of every public function that takes or gives a tensor.

A shape is written in brackets by the names of its dims, as in `[batch, sequence / cp, features]`,
or as a tuple of Python, as in `(size * n,)` and `(rows, ...)`; `[...]` is any shape. Words do where
they say as much: `any shape`, `the shape of x`, `the parameter's shape`, `scalar`, `0-dim`, `flat`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import classes, each_room, tree

DIMS = re.compile(
    r"(?<![\w)\]])\[[\w.*/+ \n-]+(?:,[\w.*/+ \n-]+)*\]"  # no index, as in `softmax(logits)[target]`
    r"|\((?:[^()]+,|[^()]+, \.\.\.|\.\.\.|[^\[\]]*\*\w+\.shape)\)"
)
WORDS = re.compile(
    r"\b(?:scalars?|flat|0-dim|any\s+shape|shapes?\s+(?:of|that)|in\s+(?:its|their)\s+shapes?)\b"
    r"|'s?\s+shapes?\b"
)
Function = tuple[ast.ClassDef | None, ast.FunctionDef]


def says_a_shape(text: str) -> bool:
    """Whether a docstring has the dims of a tensor, or says that it may have any."""
    return bool(DIMS.search(text) or WORDS.search(text))


def has_a_tensor(function: ast.FunctionDef) -> bool:
    """Whether an argument or the result is annotated with a tensor; functions of tensors aside."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    annotations = [*(one.annotation for one in every), function.returns]
    return any(note is not None and _names_a_tensor(note) for note in annotations)


def _names_a_tensor(note: ast.expr) -> bool:
    if isinstance(note, ast.Subscript) and ast.unparse(note.value) == "Callable":
        return False
    if isinstance(note, (ast.Name, ast.Attribute)):
        return ast.unparse(note).rpartition(".")[2] == "Tensor"
    if isinstance(note, ast.Constant) and isinstance(note.value, str):
        return _names_a_tensor(ast.parse(note.value, mode="eval").body)
    return any(_names_a_tensor(one) for one in ast.iter_child_nodes(note) if _is_expression(one))


def _is_expression(node: ast.AST) -> bool:
    return isinstance(node, ast.expr)


def overrides(owner: ast.ClassDef, name: str) -> bool:
    """Whether a class of the package, above `owner`, has a method of this name with a docstring."""
    for base in owner.bases:
        above = classes().get(ast.unparse(base).partition("[")[0])  # `nn.Module` is none of ours
        if above is not None:
            methods = [node for node in above.body if isinstance(node, ast.FunctionDef)]
            if any(one.name == name and ast.get_docstring(one) for one in methods):
                return True
            if overrides(above, name):
                return True
    return False


def public_functions(root: ast.Module) -> Iterator[Function]:
    """(class or None, function) of what a module offers: no name begins with an underscore."""
    for node in root.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield None, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield node, method


def silent(root: ast.Module) -> Iterator[str]:
    """(line: name) of every public function with a tensor whose docstring says no shape."""
    for owner, function in public_functions(root):
        decorators = {ast.unparse(one) for one in function.decorator_list}
        if decorators & {"overload"} or not has_a_tensor(function):
            continue
        if owner is not None and overrides(owner, function.name):
            continue
        if not says_a_shape(ast.get_docstring(function) or ""):
            where = function.name if owner is None else f"{owner.name}.{function.name}"
            yield f"{function.lineno}: {where}"


@each_room
def test_a_docstring_says_the_shapes_of_its_tensors(path: Path) -> None:
    broken = list(silent(tree(path)))
    assert not broken, (
        "say the shapes by the names of dims, as in [batch, sequence / cp, features]:\n"
        + "\n".join(broken)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("`x` [..., in / size] -> [..., out].", True),
        ("The positions [sequence / cp] of a rank.", True),
        ("`full` (size * n,) becomes the shards (n,) in order.", True),
        ("Rows (sum of splits, ...), contiguous.", True),
        ("Parts (len(by), *out.shape).", True),
        ("Two scalars.", True),
        ("A tensor of any shape.", True),
        ("Zeros of the shape of `q`.", True),
        ("The value, in the parameter's shape.", True),
        ("The parts, in their shapes.", True),
        ("The loss, 0-dim.", True),
        ("(out, lse) over all blocks.", False),
        ("Sum of -log softmax(logits)[target].", False),
        ("This rank's part of the sum (collective).", False),
        ("What the shape is for.", False),
    ],
)
def test_shapes_are_seen(text: str, *, says: bool) -> None:
    assert says_a_shape(text) is says


@pytest.mark.parametrize(
    ("signature", "has"),
    [
        ("x: Tensor", True),
        ("x: torch.Tensor | None = None", True),
        ("*, pairs: Sequence[tuple[str, 'Tensor | None']]", True),
        ("fill: Callable[[Tensor], None]", False),
        ("layout: TensorLayout", False),
    ],
)
def test_tensors_are_seen(signature: str, *, has: bool) -> None:
    function = ast.parse(f"def call({signature}) -> None: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert has_a_tensor(function) is has
