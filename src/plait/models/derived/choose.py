"""Which layers become rows: those whose demand holds, the largest first."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from plait.models.derived.cuts import Misfit
from plait.models.derived.demands import Demand
from plait.models.derived.kinds import ATTENTION, LINEAR, in_features, is_linear, splits_heads
from plait.models.derived.record import Graph, Value, taken_layers
from plait.models.derived.region import Region
from plait.values import PyTree


def pattern_of(name: str) -> str:
    """A name with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def layer_pattern(name: str) -> str:
    """A pattern of layers that are alike: those of one sequence of layers stay apart.

    >>> layer_pattern("blocks.1.mlp.0")
    'blocks.*.mlp.0'
    """
    head, dot, last = name.rpartition(".")
    return f"{pattern_of(head)}{dot}{last}"


@dataclass
class RowChoice:
    """Rows by pattern with all that they ask; `left_out` says why others are none.

    `attentions`: the modules of torch's attention that are split by heads.
    """

    rows: dict[str, int] = field(default_factory=dict)
    region: Region = field(default_factory=Region)
    entered: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    attentions: frozenset[str] = frozenset()


def choose(
    model: nn.Module,
    graph: Graph,
    size: int,
    refused: Mapping[str, str] | None = None,
    no_rows: Collection[str] = (),
) -> RowChoice:
    """Rows that hold together; `refused` are patterns that may be none, with the reasons.

    `no_rows`: layers that give the logits, or that share a parameter with another module.
    """
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    called = {node.name for node in graph.nodes if node.kind == LINEAR}
    groups: dict[str, dict[str, int]] = {}
    for name, module in layers.items():
        if name in called and name not in no_rows:
            groups.setdefault(layer_pattern(name), {})[name] = in_features(module)
    left_out = dict(refused or {})
    alone: dict[str, Region] = {}
    beside = _readers_of_one_value(graph, groups)
    for pattern in list(groups):
        if pattern in left_out:
            continue
        try:
            region, groups[pattern] = _alone(graph, groups[pattern], beside.get(pattern), size)
        except Misfit as misfit:
            left_out[pattern] = f"it is no row, as {misfit}"
        else:
            if region.columns:
                alone[pattern] = region
    weight = {
        pattern: _weight(layers, groups[pattern], region) for pattern, region in alone.items()
    }
    rows: dict[str, int] = {}
    for pattern in sorted(alone, key=lambda one: -weight[one]):
        if groups[pattern].items() <= rows.items():
            continue
        try:
            _region(graph, {**rows, **groups[pattern]}, size)
        except Misfit as misfit:
            left_out[pattern] = f"it is no row, as {misfit}"
        else:
            rows |= groups[pattern]
    demand = Demand(graph, rows, size)
    region = demand.run()
    entered = frozenset(name for name in region.columns if demand.entered(name))
    return RowChoice(rows, region, entered, left_out, _attentions(model, graph, size, no_rows))


def _attentions(
    model: nn.Module, graph: Graph, size: int, no_rows: Collection[str]
) -> frozenset[str]:
    """The modules of torch's attention whose heads can be split, and whose weights they alone
    take.
    """
    called = {node.name for node in graph.nodes if node.kind == ATTENTION}
    taken = taken_layers(graph) | frozenset(no_rows)
    return frozenset(
        name
        for name in called
        if splits_heads(model.get_submodule(name), size) and not taken & {name, f"{name}.out_proj"}
    )


def _alone(
    graph: Graph, rows: dict[str, int], beside: dict[str, int] | None, size: int
) -> tuple[Region, dict[str, int]]:
    """The region of rows, with those beside them where they do not hold without."""
    try:
        return _region(graph, rows, size), rows
    except Misfit:
        if beside is None:
            raise
        return _region(graph, beside, size), beside


def _readers_of_one_value(
    graph: Graph, groups: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """The rows that read the same values, for each pattern that is not alone at its input.

    A layer and the low-rank matrix beside it are rows together, or none is.
    """
    readers: dict[Value, set[str]] = {}
    for node in graph.nodes:
        if node.kind == LINEAR and layer_pattern(node.name) in groups:
            readers.setdefault(node.inputs[0], set()).add(layer_pattern(node.name))
    by_pattern: dict[str, dict[str, int]] = {}
    for patterns in readers.values():
        if len(patterns) > 1:
            together = {
                name: size for one in sorted(patterns) for name, size in groups[one].items()
            }
            for pattern in patterns:
                by_pattern[pattern] = by_pattern.get(pattern, {}) | together
    return by_pattern


def _region(graph: Graph, rows: Mapping[str, int], size: int) -> Region:
    for name, length in rows.items():
        if length % size:
            raise Misfit(f"{size} ranks do not divide the {length} input features of '{name}'")
    return Demand(graph, rows, size).run()


def _weight(layers: Mapping[str, nn.Module], rows: Mapping[str, int], region: Region) -> int:
    modules: list[PyTree] = [layers[name] for name in (*rows, *region.columns)]
    return sum(int(module.weight.numel()) for module in modules)
