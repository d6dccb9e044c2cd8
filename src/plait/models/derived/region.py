"""The region of a model whose values ranks have in parts, and what dropout in it must know.

A rank draws one device's mask, and cuts its part. The last split layer before gives the layout, and
a word of the role the dim that is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from plait.models.derived.cuts import ALIKE, Cut, Misfit, Want, even, in_words
from plait.models.derived.kinds import ATTENTION, DROPOUT, LINEAR
from plait.models.derived.record import Graph, GraphNode, Value


@dataclass
class Region:
    """The values that ranks have in parts or share between such, and what layers become there.

    Attributes:
        columns: linear layers whose output features are cut, and how.
        spread: layers that compute alike, and whose outputs go between columns and rows.
        inside: layers between columns and rows that every rank computes alike.
        norms: norms of features that are cut.
        tables: embeddings whose features are cut.
        parameters: parameters that code takes by itself, and how they are cut.
        wants: how each value of the region is cut, or that it is whole.
        dropped: the dim that is cut of what a module drops, by its name and the number of dims.
    """

    columns: dict[str, Cut] = field(default_factory=dict)
    spread: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    parameters: dict[str, Want] = field(default_factory=dict)
    wants: dict[Value, Want] = field(default_factory=dict)
    dropped: dict[str, dict[int, int]] = field(default_factory=dict)


def whose(name: str) -> str:
    """A module in words, by its name; the root has none."""
    return f"'{name}'" if name else "the model"


def in_backward_again(name: str, where: str) -> str:
    """The text for dropout that a checkpoint of torch runs again, `where` no rank can cut it."""
    return (
        f"torch.utils.checkpoint runs the dropout of {whose(name)} again in backward, {where}; "
        "leave the checkpoint out and write remat:full in the plan"
    )


def check_dropped(graph: Graph, region: Region, rows: Collection[str]) -> None:
    """Raise `Misfit` where a rank could not tell whether and where a dropped value is cut.

    It knows what the last layer left, and one dim for each number of dims in a forward.
    """
    for node, is_cut in _dropping(graph, region, rows):
        want = region.wants.get(node.inputs[0])
        dim = want.dim if isinstance(want, Cut) else None
        known = _feature_dims(region, node)
        if known and (is_cut != (dim is not None) or (is_cut and known != {dim})):
            taken = [in_words(even(one, 0)) for one in sorted(known)] if is_cut else ["whole"]
            shape = list(node.inputs[0].shape)
            raise Misfit(
                f"the dropout of {whose(node.name)} gets a tensor {shape}, which is "
                f"{in_words(want or ALIKE)}. "
                f"By the layer before it, a rank takes it for {' and '.join(taken)}"
            )
    for node in _dropping_first(graph, region, rows):
        if isinstance(region.wants.get(node.inputs[0]), Cut):
            where = "and no split layer before it that says which part a rank has"
            raise Misfit(in_backward_again(node.name, where))


def _feature_dims(region: Region, node: GraphNode) -> set[int]:
    """The dims that a rank takes to be cut of what a node drops; empty if it looks at none.

    A module of dropout knows its own word, and a function the words of all modules around it.
    """
    num_dims = len(node.inputs[0].shape)
    if node.func is nn.Dropout:
        return {region.dropped.get(node.name, {}).get(num_dims, num_dims - 1)}
    return {
        dims[num_dims]
        for name, dims in region.dropped.items()
        if num_dims in dims and (not name or f"{node.name}.".startswith(f"{name}."))
    }


def _dropping(
    graph: Graph, region: Region, rows: Collection[str]
) -> Iterator[tuple[GraphNode, bool]]:
    """The nodes that drop numbers, and whether the last layer before each left features cut."""
    is_cut = False
    for node in graph.nodes:
        if node.kind == LINEAR and node.name in region.columns:
            is_cut = True
        elif (node.kind == LINEAR and node.name in rows) or node.kind == ATTENTION:
            is_cut = False
        elif node.kind == DROPOUT:
            yield node, is_cut


def _dropping_first(graph: Graph, region: Region, rows: Collection[str]) -> Iterator[GraphNode]:
    """The nodes that drop numbers under torch's checkpoint, and before any split layer there.

    A backward runs that code again. A rank then knows the layout of no layer before it.
    """
    known = region.columns.keys() | set(rows)
    repeat = 0
    for node in graph.nodes:
        if node.kind == ATTENTION or (node.kind == LINEAR and node.name in known):
            repeat = node.repeat
        elif node.kind == DROPOUT and node.repeat not in {0, repeat}:
            yield node


def with_dropout_of_samples(graph: Graph, region: Region, rows: Collection[str]) -> Region:
    """A region where whatever functions drop has a dim of features, as samples may be cut too.

    Of whole features it is the last one.
    """
    found = {name: dict(dims) for name, dims in region.dropped.items()}
    unlike: set[tuple[str, int]] = set()
    for node, is_cut in _dropping(graph, region, rows):
        num_dims = len(node.inputs[0].shape)
        if node.func is not nn.Dropout and num_dims not in region.dropped.get(node.name, {}):
            found.setdefault(node.name, {})[num_dims] = num_dims - 1
            unlike |= {(node.name, num_dims)} if is_cut else set()
    for name, num_dims in unlike:
        for around in [one for one in found if not one or f"{name}.".startswith(f"{one}.")]:
            found[around].pop(num_dims, None)
    return replace(region, dropped=found)
