"""The forward with the sizes of one rank: numbers that the code of a model holds are found.

Attention that reshapes to `self.num_heads` fails where a rank has half of the heads. The line says
which attribute it was; that is divided, and the forward runs again. Where none helps, a size of the
view itself is divided, since code may take it from its input. Every shape must be the one that the
cuts say: a wrong number may fit by chance.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait import divided_views
from plait.divided_views import LastView
from plait.models.derived.choose import RowChoice, pattern_of
from plait.models.derived.cuts import Cut, Misfit
from plait.models.derived.record import Graph, GraphNode, alive
from plait.models.derived.rules import operation
from plait.models.derived.stand_ins import Sizes

MOST_NUMBERS = 24
_PARSING = threading.Lock()  # Python's parser is not safe on threads

_OWN_NUMBER = re.compile(r"self(\.config)?\.\w+")
Held = tuple[nn.Module, str, Any]
"""A module, the name of an attribute of its own, and what it was; `ABSENT` for one that it had not.
"""
ABSENT = object()
RECOMPUTED = (
    "torch.utils.checkpoint runs its views again in backward, outside of its forward, where no "
    "size is divided; leave the checkpoint out and write remat:full in the plan"
)


@dataclass
class TrialStage:
    """A forward of one rank: what is divided by module pattern, and why it stops.

    An entry of `divided` is the name of an attribute, or a word of `plait.divided_views`.

    `reached`: the number of the last node that is as the cuts say.
    """

    divided: dict[str, list[str]] = field(default_factory=dict)
    place: str = ""
    reason: str = ""
    reached: int = 0


def rehearse(
    model: nn.Module,
    run_again: Callable[..., Graph],
    whole: tuple[Graph, RowChoice],
    size: int,
    divided: Mapping[str, Sequence[str]] | None = None,
) -> TrialStage:
    """Run it as one of `size` ranks; `place` is empty where it runs to the end.

    `divided` is so from the start, as another forward needs it.
    """
    graph, choice = whole
    expected = _expected(graph, choice, size)
    sizes = _sizes(choice, size, model)
    stage = TrialStage({pattern: list(numbers) for pattern, numbers in (divided or {}).items()})
    replaced: list[Held] = []
    recomputed = {pattern_of(name) for name in graph.recomputed}
    for pattern in recomputed & stage.divided.keys():
        if any(map(divided_views.is_word, stage.divided[pattern])):
            stage.place, stage.reason = pattern, RECOMPUTED
            return stage

    last_view = LastView(size)

    def attempt() -> tuple[int, Exception | None]:
        seen = [0]

        def check(node: GraphNode, outputs: Sequence[Tensor | None]) -> None:
            _compare(graph, node, outputs, expected)
            seen[0] = node.index

        try:
            with last_view:
                run_again(sizes=sizes, check=check)
        except Exception as failure:
            return seen[0], failure
        return len(graph.nodes), None

    try:
        for pattern, numbers in stage.divided.items():
            for number in numbers:
                replaced += _divide(model, pattern, number, size)
        reached, failure = attempt()
        for _ in range(MOST_NUMBERS):
            if failure is None:
                return stage
            view = _view_word(graph, expected, reached, last_view.sizes)
            for name, number in _suspects(model, failure, size, view):
                if divided_views.is_word(number) and pattern_of(name) in recomputed:
                    continue
                originals = _divide(model, name, number, size)
                further, again = attempt()
                if further > reached or again is None:
                    replaced += originals
                    stage.divided.setdefault(pattern_of(name), []).append(number)
                    reached, failure = further, again
                    break
                _restore(originals)
            else:
                break
        stage.place, stage.reason = _place(model, failure)
        stage.reached = reached
        return stage
    finally:
        _restore(replaced)


def _expected(graph: Graph, choice: RowChoice, size: int) -> dict[tuple[int, int], tuple[int, ...]]:
    shapes = {}
    needed = alive(graph)
    for node in (node for node in graph.nodes if node.index in needed):
        inside = any(value in choice.region.wants for value in node.outputs if value is not None)
        for index, value in enumerate(node.outputs):
            if value is not None and (value in choice.region.wants or not inside):
                want = choice.region.wants.get(value)
                shapes[node.index, index] = value.shape
                if isinstance(want, Cut):
                    shapes[node.index, index] = want.local(value.shape, size)
    return shapes


def _sizes(choice: RowChoice, size: int, model: nn.Module) -> Sizes:
    region = choice.region
    outputs = {name: cut.local((0,), size)[0] for name, cut in _flat(region.columns).items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, want in region.parameters.items():
        if isinstance(want, Cut):
            shapes[name] = want.local(tuple(model.get_parameter(name).shape), size)
    for name in (*region.norms, *region.tables):
        for key, param in model.get_submodule(name)._parameters.items():
            if param is not None:
                shapes[f"{name}.{key}"] = (*param.shape[:-1], param.shape[-1] // size)
    return Sizes(outputs, shapes)


def _flat(columns: dict[str, Cut]) -> dict[str, Cut]:
    return {name: Cut(0, cut.parts) for name, cut in columns.items()}


def _compare(
    graph: Graph,
    node: GraphNode,
    outputs: Sequence[Tensor | None],
    wanted: dict[tuple[int, int], tuple[int, ...]],
) -> None:
    if node.index >= len(graph.nodes):
        raise Misfit(f"a rank runs more than the {len(graph.nodes)} operations of one device")
    whole = graph.nodes[node.index]
    if (whole.kind, whole.name, whole.func) != (node.kind, node.name, node.func):
        raise Misfit(f"a rank runs {_name_of(node)} where one device runs {_name_of(whole)}")
    for mine, of_whole in zip(_factors(node), _factors(whole), strict=True):
        if mine != of_whole:
            raise Misfit(f"a rank computes with {mine} where one device does with {of_whole}")
    for index, output in enumerate(outputs):
        shape = wanted.get((node.index, index))
        if output is not None and shape is not None and tuple(output.shape) != shape:
            raise Misfit(f"a rank has {list(output.shape)} where {list(shape)} is its part")


def _name_of(node: GraphNode) -> str:
    return operation(node) if node.kind == "op" else f"'{node.name}'"


def _factors(node: GraphNode) -> list[float]:
    """The numbers that an operation computes with: those that are no sizes or indices."""
    if node.kind != "op":
        return []
    kinds = (int, float) if torch.Tag.pointwise in node.func.tags else float
    return [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, kinds)]


def _frames(failure: BaseException | None) -> list[tuple[FrameType, int]]:
    """The frames of the model's own code, the innermost first."""
    frames: list[tuple[FrameType, int]] = []
    trace: TracebackType | None = None if failure is None else failure.__traceback__
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), nn.Module):
            frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    own = [(frame, line) for frame, line in frames if "/torch/" not in frame.f_code.co_filename]
    return own[::-1]


def _view_word(
    graph: Graph,
    expected: dict[tuple[int, int], tuple[int, ...]],
    reached: int,
    sizes: tuple[int, ...],
) -> str:
    """The word for the view that fails behind the node `reached`; empty where none does.

    `sizes` are those that the code gives it.
    """
    for node in graph.nodes[reached:]:
        whole = node.outputs[0] if node.outputs else None
        if sizes and whole is not None and whole.shape == sizes:
            local = expected.get((node.index, 0), sizes)
            cut = [dim for dim, size in enumerate(sizes) if local[dim] != size]
            return divided_views.word(len(sizes), cut[0]) if cut else ""
    return ""


def _suspects(
    model: nn.Module, failure: BaseException, size: int, view: str
) -> Iterator[tuple[str, str]]:
    """(module, attribute or word) whose number may be that of one device, the likeliest first.

    `view`: the word for the view that fails, if one does.
    """
    name_of = {id(module): name for name, module in model.named_modules()}
    innermost: str | None = None
    for frame, line in _frames(failure)[:3]:
        module = frame.f_locals["self"]
        name = name_of.get(id(module))
        if name is None:
            continue
        innermost = name if innermost is None else innermost
        attributes = [
            attribute
            for attribute in _attributes_near(frame, line)
            if (number := number_of(module, attribute)) is not None
            and number > 1
            and number % size == 0
        ]
        likely = [one for one in attributes if "head" in one and "dim" not in one]
        for attribute in dict.fromkeys([*likely, *attributes]):
            yield name, attribute
    if view and innermost is not None:
        yield innermost, view


def _attributes_near(frame: FrameType, line: int) -> list[str]:
    """Attributes of `self` in the statement at a line, and in those that give it its names."""
    try:
        source, first = inspect.getsourcelines(frame.f_code)
        with _PARSING:
            tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, SyntaxError, TypeError):
        return []
    at = line - max(first, 1) + 1
    statements = [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]
    around = [one for one in statements if one.lineno <= at <= (one.end_lineno or one.lineno)]
    if not around:
        return []
    statement = min(around, key=lambda one: (one.end_lineno or one.lineno) - one.lineno)
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    giving = [one for one in statements if isinstance(one, ast.Assign) and _binds(one) & names]
    paths = [
        ast.unparse(node)
        for one in (statement, *giving)
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute)
    ]
    return [path.removeprefix("self.") for path in paths if _OWN_NUMBER.fullmatch(path)]


def number_of(module: nn.Module, path: str) -> int | None:
    """The whole number that a module, or its config, has under a name; None for anything else."""
    owner, _, name = path.rpartition(".")
    held = getattr(module, owner, None) if owner else module
    value = getattr(held, name, None)
    return value if type(value) is int else None


def set_number(module: nn.Module, path: str, value: int) -> None:
    """Give a module another number; a config is copied first, as others have it too."""
    owner, _, name = path.rpartition(".")
    if not owner:
        setattr(module, name, value)
        return
    own = copy.copy(getattr(module, owner))
    setattr(own, name, value)
    setattr(module, owner, own)


def _divide(model: nn.Module, name: str, number: str, size: int) -> list[Held]:
    """Divide the number of every module of this pattern; what it was before."""
    pattern = pattern_of(name)
    alike = [module for other, module in model.named_modules() if pattern_of(other) == pattern]
    originals: list[Held] = []
    if views := divided_views.positions_of(f"share {number}"):
        for module in alike:
            originals.append((module, "forward", vars(module).get("forward", ABSENT)))
            divided_views.divide_views(module, views, size)
        return originals
    root = number.partition(".")[0]
    for module in alike:
        value = number_of(module, number)
        if value is not None and value % size == 0:
            originals.append((module, root, getattr(module, root)))
            set_number(module, number, value // size)
    return originals


def _restore(held: Sequence[Held]) -> None:
    for module, attribute, value in reversed(held):
        if value is ABSENT:
            delattr(module, attribute)
        else:
            setattr(module, attribute, value)


def _place(model: nn.Module, failure: BaseException | None) -> tuple[str, str]:
    """The module whose code fails, and the line in words."""
    name_of = {id(module): name for name, module in model.named_modules()}
    for frame, line in _frames(failure):
        name = name_of.get(id(frame.f_locals["self"]))
        if name:
            file = frame.f_code.co_filename.rpartition("/")[2]
            return name, f"{file}:{line} counts on the size of one device: {failure}"
    return "model", str(failure)


def _binds(assignment: ast.Assign) -> set[str]:
    """The names in the targets of an assignment."""
    nodes = [node for target in assignment.targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}
