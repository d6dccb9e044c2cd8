"""A warning where a `Function` of autograd makes a gradient that no gradient goes into.

Each micro-batch's backward begins with its share of the mean loss, and their gradients are added.
What a `Function` makes of itself, such as a one, has no such share, and counts once for each part.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from plait.comm import World
from plait.engine.loss import LossFunction
from plait.plan import Plan
from plait.torch_internals import is_recorded
from plait.values import PyTree

FUNCTIONS = ast.FunctionDef | ast.Lambda
OF_A_SHAPE: Final = {
    *("device", "dtype", "shape", "size", "dim", "ndim", "numel", "is_cuda", "new_ones"),
    *("new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "empty_like", "full_like"),
}
"""Names of what depends on the shape of a tensor, not on its values."""
ZEROS: Final = {"zeros", "zeros_like", "new_zeros"}


class OwnBackwards:
    """A loss function whose first graph is looked through, with that of the model."""

    def __init__(self, function: LossFunction, num_parts: int) -> None:
        """Look at the `function` of one of `num_parts` micro-batches of a step."""
        self._function = function
        self._num_parts = num_parts
        self._is_seen = False

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a micro-batch. It warns once of a backward that makes gradients."""
        loss = self._function(output, targets)
        if self._is_seen or torch.compiler.is_compiling() or is_recorded():
            return loss
        value = loss[0] if isinstance(loss, tuple) and loss else loss
        if isinstance(value, Tensor) and value.grad_fn is not None:
            self._is_seen = True
            for function in _functions(value.grad_fn):
                if makes_gradients(function):
                    _warn(function, self._num_parts)
                    break
        return loss


def looked_through(loss: LossFunction, plan: Plan, world: World) -> LossFunction:
    """A loss whose first graph one rank looks through, where a plan divides the batch.

    Compiled ones are left as they are.
    """
    num_parts = plan.dp.size * plan.cp.size * plan.micro_batches
    is_left = plan.compile or world.worker[0] > 0 or world.axis("tp").rank > 0
    return loss if is_left or num_parts == 1 else OwnBackwards(loss, num_parts)


def _warn(function: type[torch.autograd.Function], num_parts: int) -> None:
    warnings.warn(
        f"{function.__name__}.backward returns a gradient that does not depend on the one it gets; "
        f"the plan divides a batch into {num_parts} parts, whose gradients are added, so this one "
        "counts once for each part: add its term to the loss, with a tensor that the forward "
        "returns; or, if the gradient it gets is that of the loss, multiply by it",
        stacklevel=3,
    )


def _functions(first: Node) -> Iterator[type[torch.autograd.Function]]:
    """The classes of `Function`, but torch's and plait's, in the graph that ends in a node."""
    seen: set[Node] = set()
    classes: set[type] = set()
    left: list[Node | None] = [first]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left.extend(following for following, _ in node.next_functions)
        function = getattr(type(node), "_forward_cls", None)
        if function is None or function in classes:
            continue
        classes.add(function)
        if function.__module__.partition(".")[0] not in ("torch", "plait"):
            yield function


@cache
def makes_gradients(function: type[torch.autograd.Function]) -> bool:
    """Whether the source of a backward returns a gradient that is made of no gradient."""
    try:
        source = textwrap.dedent(inspect.getsource(function.backward))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(tree, ast.FunctionDef):
        return False
    return _Backward(tree).makes_gradients()


class _Backward:
    """The names in the source of a backward that depend on the gradients which it gets."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self._tree = tree
        self._nodes = list(ast.walk(tree))
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        several = [tree.args.vararg] if tree.args.vararg else []
        self._context = arguments[0].arg if arguments else ""
        self._dependent = {one.arg for one in [*arguments[1:], *several]}
        self._own = {
            node.id
            for node in self._nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        known = -1
        while known != len(self._dependent):
            known = len(self._dependent)
            for node in self._nodes:
                self._spread(node)

    def makes_gradients(self) -> bool:
        """Whether a value of a return is none, nor zeros, nor dependent."""
        inner: set[ast.AST] = set()
        for function in self._nodes:
            if isinstance(function, FUNCTIONS) and function is not self._tree:
                inner.update(ast.walk(function))
        for node in self._nodes:
            if isinstance(node, ast.Return) and node not in inner and node.value is not None:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                if any(not self._depends(one) and not self._is_nothing(one) for one in values):
                    return True
        return False

    def _spread(self, node: ast.AST) -> None:
        """Take the names that a statement or a call makes dependent."""
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and self._depends(node.value):
                self._take(*targets)
        elif isinstance(node, ast.For | ast.comprehension):
            if self._depends(node.iter):
                self._take(node.target)
        elif isinstance(node, ast.Call):
            given = [*node.args, *(one.value for one in node.keywords)]
            if any(self._depends(one) for one in given):
                self._take(node.func, *given)  # a call may write into what it gets
        elif isinstance(node, ast.withitem) and self._depends(node.context_expr):
            self._take(*([node.optional_vars] if node.optional_vars else []))

    def _take(self, *nodes: ast.AST) -> None:
        for node in nodes:
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            self._dependent |= names & (self._own | {self._context})

    def _depends(self, node: ast.AST) -> bool:
        """Whether the value of an expression depends on a gradient that the backward gets."""
        if isinstance(node, ast.Name):
            return node.id in self._dependent
        if isinstance(node, ast.Attribute):
            return node.attr == "grad" or (
                node.attr not in OF_A_SHAPE and self._depends(node.value)
            )
        if isinstance(node, ast.Call) and _name(node.func) in OF_A_SHAPE:
            return False
        return any(self._depends(one) for one in ast.iter_child_nodes(node))

    def _is_nothing(self, node: ast.AST) -> bool:
        """Whether an expression is no gradient, or zeros that nothing is written into."""
        parts: list[ast.AST] = []
        match node:
            case ast.Constant():
                return True
            case ast.Call():
                return _name(node.func) in ZEROS
            case ast.Name() if self._is_filled(node.id):
                return False
            case ast.Name():
                parts = self._values(node.id)
            case ast.IfExp():
                parts = [node.body, node.orelse]
            case ast.BinOp():  # (None,) * 3
                parts = [node.left]
            case ast.Tuple() | ast.List():
                parts = list(node.elts)
            case ast.Starred():
                parts = [node.value]
        return bool(parts) and all(map(self._is_nothing, parts))

    def _values(self, name: str) -> list[ast.AST]:
        """The values that are assigned to a name; a part of several values is known by them all."""
        values: list[ast.AST] = []
        for node in self._nodes:
            if isinstance(node, ast.Assign) and name in set().union(*map(_stored, node.targets)):
                values.append(node.value)
        return values

    def _is_filled(self, name: str) -> bool:
        """Whether something is written into the tensor of a name, as by `scatter_`."""
        for node in self._nodes:
            place: ast.AST | None = None
            match node:
                case ast.Attribute() if node.attr.endswith("_"):
                    place = node.value
                case ast.Subscript(ctx=ast.Store()):
                    place = node.value
                case ast.AugAssign():
                    place = node.target
            if isinstance(place, ast.Name) and place.id == name:
                return True
        return False


def _stored(target: ast.AST) -> set[str]:
    names = (one for one in ast.walk(target) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, ast.Store)}


def _name(node: ast.AST) -> str:
    """The last name of what is called, as `zeros` of `torch.zeros`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
