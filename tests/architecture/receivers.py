"""Whose attributes a module sets: the class of each receiver, as far as annotations say it.

A type is a syntax tree, as an annotation has it. Locals take theirs from parameters, constructors,
loops, and the attributes and results of other objects.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path

from tests.architecture.source import files, nodes, tree

SEQUENCES = {"list", "tuple", "set", "deque", "Sequence", "Iterable", "Iterator", "Collection"}
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Type = ast.expr | None
Types = dict[str, ast.expr]


@dataclass
class ClassFacts:
    """A class of the package: its bases, and the types of its attributes and results."""

    bases: tuple[str, ...] = ()
    is_mutable_dataclass: bool = False
    attributes: Types = field(default_factory=dict)
    returns: Types = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """The classes and the results of functions, by their names."""

    classes: dict[str, ClassFacts] = field(default_factory=dict)
    returns: Types = field(default_factory=dict)

    def attribute(self, owner: Type, name: str) -> Type:
        """The type of an attribute of an object."""
        return self._of(owner, lambda facts: facts.attributes.get(name))

    def result(self, owner: Type, name: str) -> Type:
        """The type that a method of an object returns."""
        return self._of(owner, lambda facts: facts.returns.get(name))

    def _of(self, owner: Type, ask: Callable[[ClassFacts], Type]) -> Type:
        for name in self.lineage(name_of(owner)):
            if (known := ask(self.classes[name])) is not None:
                return plain(known)
        return None

    def lineage(self, name: str) -> Iterator[str]:
        """A class of the package and those that it extends."""
        if name in self.classes:
            yield name
            for base in self.classes[name].bases:
                if base != name:
                    yield from self.lineage(base)


@dataclass(frozen=True)
class Assignment:
    """An attribute that is set from outside: on which receiver, of which class, in which class."""

    path: Path
    line: int
    receiver: str
    attribute: str
    of_class: str
    inside: str
    is_through_another: bool
    """Whether the receiver is an attribute of another object with behaviour."""


def name_of(node: Type) -> str:
    """The last name of a type: `World` for `comm.World`; empty where there is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def plain(node: Type) -> Type:
    """A type without `| None` and quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return plain(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        return plain(next(one for one in sides if not isinstance(one, ast.Constant) or one.value))
    return node


def items_of(node: Type, position: int = -1) -> Type:
    """The type of what a container holds; of a mapping, the keys are at position 0."""
    node = plain(node)
    if not isinstance(node, ast.Subscript):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name_of(node.value) in MAPPINGS:
        return plain(parts[position])
    return plain(parts[0]) if name_of(node.value) in SEQUENCES else None


class Scope:
    """The types of the names in one function, or in the main text of a module."""

    def __init__(self, known: Known, owner: str, outer: Types) -> None:
        self.known = known
        self._owner = owner
        self.types: Types = dict(outer)

    def enter(self, function: Function) -> None:
        """Take the parameters of a function."""
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.types.pop(argument.arg, None)
            self._take(argument.arg, argument.annotation)
        if self._owner and arguments.args and arguments.args[0].arg in {"self", "cls"}:
            self._take(arguments.args[0].arg, ast.Name(self._owner))

    def read(self, node: ast.AST) -> None:
        """Take the names that a statement or an expression binds."""
        for target, found in self._bindings(node):
            for name, type_ in _spread(target, found):
                self._take(name, type_)

    def _take(self, name: str, type_: Type) -> None:
        if (type_ := plain(type_)) is not None:
            self.types[name] = type_

    def _bindings(self, node: ast.AST) -> Iterator[tuple[ast.expr, Type]]:
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.annotation
        elif isinstance(node, ast.NamedExpr):
            yield node.target, self.type_of(node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, self.type_of(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield node.target, self._each(node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            entered = self.type_of(node.context_expr)
            inside = items_of(entered)
            yield node.optional_vars, entered if inside is None else inside

    def _each(self, node: ast.expr) -> Type:
        """The type of what a loop goes over."""
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            if called == "enumerate":
                return _tuple([None, self._each(node.args[0])])
            if called == "zip":
                return _tuple([self._each(part) for part in node.args])
            if called in {"list", "sorted", "reversed", "tuple"} and node.args:
                return self._each(node.args[0])
            if isinstance(node.func, ast.Attribute) and called in {"items", "values"}:
                held = self.type_of(node.func.value)
                if name_of(held) in MAPPINGS:
                    value = items_of(held)
                    return value if called == "values" else _tuple([items_of(held, 0), value])
        if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
            return self.type_of(node.elts[0])
        return items_of(self.type_of(node))

    def type_of(self, node: ast.expr) -> Type:
        """The type of an expression; None where nothing says it."""
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.known.attribute(self.type_of(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return items_of(self.type_of(node.value))
        if isinstance(node, (ast.Tuple, ast.List)):
            return _tuple([self.type_of(part) for part in node.elts])
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.type_of, node.values)), None)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body) or self.type_of(node.orelse)
        if isinstance(node, ast.NamedExpr):
            return self.type_of(node.value)
        return self._result(node) if isinstance(node, ast.Call) else None

    def _result(self, node: ast.Call) -> Type:
        called = name_of(node.func)
        if called == "cls":
            return self.types.get(called)
        if called in self.known.classes:
            return ast.Name(called)
        if called in {"copy", "deepcopy", "next"} and node.args:
            return self.type_of(node.args[0])
        if isinstance(node.func, ast.Attribute):
            owner = self.type_of(node.func.value)
            if owner is None and name_of(node.func.value) in self.known.classes:
                owner = node.func.value
            if (returned := self.known.result(owner, called)) is not None:
                return returned
            if called in {"get", "pop", "popleft"}:
                return items_of(owner)
        return plain(self.known.returns.get(called))


def _tuple(parts: list[Type]) -> ast.Tuple:
    return ast.Tuple([part or ast.Constant(None) for part in parts])


def _spread(target: ast.expr, type_: Type) -> Iterator[tuple[str, Type]]:
    """The names of a target, with their part of its type."""
    if isinstance(target, ast.Starred):
        target = target.value
    if isinstance(target, ast.Name):
        yield target.id, type_
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts: list[Type] = []
        if isinstance(type_, ast.Tuple):
            parts = list(type_.elts)
        elif isinstance(type_, ast.Subscript) and isinstance(type_.slice, ast.Tuple):
            parts = list(type_.slice.elts)
        for one, part in zip_longest(target.elts, parts[: len(target.elts)]):
            yield from _spread(one, part)


@cache
def known() -> Known:
    """The classes and functions of the package."""
    found = Known()
    for path in files():
        for node in nodes(tree(path)):
            if isinstance(node, ast.ClassDef):
                found.classes[node.name] = _declared(node)
            elif isinstance(node, Function) and node.returns is not None:
                found.returns.setdefault(node.name, node.returns)
    for _ in range(3):  # an attribute may have its type from that of another class
        for path in files():
            for node in nodes(tree(path)):
                if isinstance(node, ast.ClassDef):
                    _infer(node, found)
    return found


def _declared(node: ast.ClassDef) -> ClassFacts:
    facts = ClassFacts(tuple(map(name_of, node.bases)), _is_mutable_dataclass(node))
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            facts.attributes[part.target.id] = part.annotation
        elif isinstance(part, Function) and part.returns is not None:
            is_property = any("property" in ast.unparse(one) for one in part.decorator_list)
            (facts.attributes if is_property else facts.returns)[part.name] = part.returns
    return facts


def _is_mutable_dataclass(node: ast.ClassDef) -> bool:
    texts = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(text.split("(")[0] == "dataclass" and "frozen=True" not in text for text in texts)


def _infer(node: ast.ClassDef, found: Known) -> None:
    """Take the types of the attributes that the methods of a class set on itself."""
    attributes = found.classes[node.name].attributes
    for scope, part in statements(node, found):
        for target in targets_of(part):
            if not (isinstance(target, ast.Attribute) and name_of(target.value) == "self"):
                continue
            type_: Type = None
            if isinstance(part, ast.AnnAssign):
                type_ = part.annotation
            elif isinstance(part, ast.Assign) and target in part.targets:
                type_ = scope.type_of(part.value)
            if type_ is not None:
                attributes.setdefault(target.attr, type_)


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a node binds or sets, tuples taken apart."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    for target in targets:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def statements(
    root: ast.AST, found: Known, owner: str = "", outer: Types | None = None
) -> Iterator[tuple[Scope, ast.AST]]:
    """Every node below `root` in the order of the text, with what is known of the names there."""
    scope = Scope(found, owner, outer or {})
    if isinstance(root, ast.ClassDef):
        owner = root.name
    elif isinstance(root, Function):
        scope.enter(root)
    waiting = list(ast.iter_child_nodes(root))[::-1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.ClassDef, Function)):
            yield from statements(node, found, owner, scope.types)
            continue
        scope.read(node)
        yield scope, node
        waiting += list(ast.iter_child_nodes(node))[::-1]


@cache
def assignments() -> tuple[Assignment, ...]:
    """Every attribute that is set in the package."""
    return tuple(_assignments(known()))


def _assignments(found: Known) -> Iterator[Assignment]:
    for path in files():
        for inside, root in _roots(tree(path)):
            for scope, node in statements(root, found, inside):
                for target in targets_of(node):
                    if isinstance(target, ast.Attribute):
                        yield _assignment(path, target, scope, inside)


def _assignment(path: Path, target: ast.Attribute, scope: Scope, inside: str) -> Assignment:
    receiver = target.value
    through = False
    if isinstance(receiver, ast.Attribute):
        holder = scope.known.classes.get(name_of(scope.type_of(receiver.value)))
        is_own = name_of(receiver.value) in {"self", "cls"}
        through = holder is not None and not is_own and not holder.is_mutable_dataclass
    type_ = name_of(scope.type_of(receiver))
    text = ast.unparse(receiver)
    return Assignment(path, target.lineno, text, target.attr, type_, inside, through)


def _roots(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The main text of a module and its classes, each with the class that it is."""
    rest = [node for node in module.body if not isinstance(node, ast.ClassDef)]
    yield "", ast.Module(rest, [])
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
