"""Demands of row layers whose inputs are cut, on everything before them.

The demand goes backward through operations until it meets linear layers. One that makes a cut value
becomes a column. One that makes a value which ranks share between cut ones spreads it. All between
is inside: its gradients are partial sums over the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from plait.models.derived.cuts import ALIKE, Cut, Misfit, Part, Want, even, joined
from plait.models.derived.kinds import ATTENTION, DROPOUT, EMBEDDING, LINEAR, NORM, OPAQUE
from plait.models.derived.record import Graph, GraphNode, Value
from plait.models.derived.rules import ask, chosen, operation, through_window
from plait.models.layers import RMSNorm
from plait.values import PyTree

MOST_PULLED = 400
KNOWN_NORMS = (nn.LayerNorm, nn.RMSNorm, RMSNorm)
"""Norms whose features can be cut."""


def is_known_norm(kind: type[nn.Module]) -> bool:
    """Whether the features of a norm can be cut: it computes what its base class does.

    A class that adds one to the weight in a forward of its own is another norm.
    """
    known = [base for base in KNOWN_NORMS if issubclass(kind, base)]
    return any(kind.forward is base.forward for base in known)


WINDOWS = ("slice", "split", "split_with_sizes", "narrow")


@dataclass
class Region:
    """The values that are wanted, and what layers and parameters become of it."""

    columns: dict[str, Cut] = field(default_factory=dict)
    spread: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    parameters: dict[str, Want] = field(default_factory=dict)
    wants: dict[Value, Want] = field(default_factory=dict)
    dropped: dict[str, dict[int, int]] = field(default_factory=dict)
    """The dim that is cut of what a module drops numbers of, by its name and the number of dims."""


class Demand:
    """The demand of a set of row layers, by their names."""

    def __init__(self, graph: Graph, rows: Mapping[str, int], size: int) -> None:
        self._graph = graph
        self._rows = rows
        self._size = size
        self._alive = alive(graph)
        self._taken = taken_layers(graph)
        self._direct: dict[Value, Want] = {}
        self._windows: dict[Value, list[tuple[int, int, int, Want]]] = {}
        self._heap: list[int] = []
        self._queued: set[int] = set()
        self.region = Region()

    def run(self) -> Region:
        """Follow it to the end. Raises `Misfit` where it cannot hold."""
        if taken := self._taken & self._rows.keys():
            raise Misfit(f"the code takes the weight of {min(taken)} by itself too")
        for node in self._graph.nodes:
            if node.kind == LINEAR and node.name in self._rows:
                value = node.inputs[0]
                self._want(value, even(len(value.shape) - 1, value.shape[-1]))
        self._backward()
        for _ in range(MOST_PULLED):
            leaks = self._leaks()
            if not leaks:
                return self._finished()
            for node in leaks:
                self._pull(node)
            self._backward()
        raise Misfit("too much hangs on the values that are cut")

    def _want(self, value: Value, want: Want) -> None:
        if isinstance(want, Cut) and any(cut and n % self._size for n, cut in want.parts):
            raise Misfit(f"{want.parts} are not divided by {self._size}")
        if value.memory in self._graph.written and isinstance(want, Cut):
            raise Misfit("memory that is written in place is cut")
        if self._direct.setdefault(value, want) != want:
            raise Misfit("one value is wanted in two ways")
        self._queue(value)

    def _queue(self, value: Value) -> None:
        if value.node is not None and value.node.index not in self._queued:
            self._queued.add(value.node.index)
            heapq.heappush(self._heap, -value.node.index)
        elif value.node is None:
            self._source(value)

    def _source(self, value: Value) -> None:
        want = self._resolved(value)
        if value.name:
            self.region.parameters[value.name] = want
        elif isinstance(want, Cut):
            raise Misfit("a value that the model is given, or makes of none, is cut")
        self.region.wants[value] = want

    def _resolved(self, value: Value) -> Want:
        """The one want of a value, from all that use it or parts of it."""
        wants = [self._direct[value]] if value in self._direct else []
        by_dim: dict[int, list[tuple[int, int, Want]]] = {}
        for dim, start, stop, want in self._windows.get(value, ()):
            if isinstance(want, Cut) and want.dim != dim:
                wants.append(want)
            else:
                by_dim.setdefault(dim, []).append((start, stop, want))
        for dim, pieces in by_dim.items():
            if all(want == ALIKE for _, _, want in pieces):
                aligned = [want for want in wants if isinstance(want, Cut) and want.dim == dim]
                if not wants or aligned:
                    wants.append(ALIKE)
                continue
            wants.append(Cut(dim, _composed(pieces, value.shape[dim])))
        if len(set(wants)) != 1:
            raise Misfit("one value is wanted in two ways")
        return wants[0]

    def _backward(self) -> None:
        while self._heap:
            index = -heapq.heappop(self._heap)
            self._queued.discard(index)
            node = self._graph.nodes[index]
            wants = [
                self._resolved(value)
                if value is not None and (value in self._direct or value in self._windows)
                else None
                for value in node.outputs
            ]
            for value, want in zip(node.outputs, wants, strict=True):
                if value is not None and want is not None:
                    self.region.wants[value] = want
            if node.kind == "op":
                self._through(node, wants)
            else:
                self._layer(node, wants[0])

    def _through(self, node: GraphNode, wanted: Sequence[Want | None]) -> None:
        name = operation(node)
        if name in WINDOWS:
            source = node.inputs[0]
            for piece in through_window(node, wanted):
                pieces = self._windows.setdefault(source, [])
                if piece not in pieces:
                    pieces.append(piece)
            self._queue(source)
            return
        asked = (
            chosen(node, wanted) if name in ("select", "unbind") else ask(node, wanted, self._size)
        )
        for value, want in asked:
            self._want(value, want)

    def _layer(self, node: GraphNode, want: Want | None) -> None:
        out = node.outputs[0]
        if node.kind in (OPAQUE, ATTENTION) or out is None or want is None:
            raise Misfit(f"{node.name} cannot be cut")
        last = isinstance(want, Cut) and want.dim == len(out.shape) - 1
        if node.kind == LINEAR:
            self._linear(node, want, last=last)
        elif node.kind == DROPOUT:
            self._dropout(node, want)
        elif node.kind == EMBEDDING:
            if isinstance(want, Cut) and not (last and len(want.parts) == 1):
                raise Misfit("the rows of a table are cut")
            (self.region.tables if last else self.region.inside).add(node.name)
        elif node.kind == NORM:
            if last:
                assert isinstance(want, Cut)
                if len(want.parts) > 1 or not is_known_norm(node.func):
                    raise Misfit(f"{node.name} is cut in several parts, or is of no known class")
                self.region.norms.add(node.name)
            else:
                self.region.inside.add(node.name)
            self._want(node.inputs[0], want)

    def _dropout(self, node: GraphNode, want: Want) -> None:
        """Numbers are dropped by one device's mask, of which a rank cuts its part."""
        value = node.inputs[0]
        if isinstance(want, Cut):
            if len(want.parts) > 1:
                raise Misfit(f"{node.name} drops what is cut in several parts")
            if node.name in self._graph.recomputed:
                raise Misfit(f"a backward draws the mask of {node.name} again, outside its forward")
            if node.func is not nn.Dropout or want.dim < len(value.shape) - 1:
                dims = self.region.dropped.setdefault(node.name, {})
                dims.setdefault(len(value.shape), want.dim)
        elif node.func is nn.Dropout:
            raise Misfit(f"{node.name} drops what every rank has, between cut values")
        self._want(value, want)

    def _linear(self, node: GraphNode, want: Want, *, last: bool) -> None:
        if node.name in self._rows:
            raise Misfit(f"{node.name} is a row, and its output is cut")
        if isinstance(want, Cut):
            if not last:
                raise Misfit("a linear layer is cut along its rows")
            if node.name in self._taken:
                raise Misfit(f"the code takes the weight of {node.name} by itself too")
            if self.region.columns.setdefault(node.name, want) != want:
                raise Misfit(f"{node.name} is cut in two ways")
        else:
            self.region.spread.add(node.name)

    def _leaks(self) -> list[GraphNode]:
        """Nodes that use a wanted value and are not of the region, though the output needs them."""
        wants = self.region.wants
        leaks: dict[int, GraphNode] = {}
        for value in wants:
            if value in self._graph.results:
                raise Misfit("the output of the model is cut")
            for node in value.users:
                self._check_column(node, value)
                known = self._known(node)
                ends = node.kind == LINEAR and (
                    node.name in self._rows or node.name in self.region.columns
                )
                if node.index in self._alive and not known and not ends:
                    leaks[node.index] = node
        return [leaks[index] for index in sorted(leaks)]

    def _check_column(self, node: GraphNode, value: Value) -> None:
        """Raise `Misfit` for a column that reads features of which a rank has a part."""
        is_column = node.kind == LINEAR and node.name in self.region.columns
        if is_column and isinstance(self.region.wants[value], Cut):
            raise Misfit(f"{node.name} needs the whole of a cut value")

    def _known(self, node: GraphNode) -> bool:
        """Whether a node is of the region: all that is used of a split's outputs is wanted."""
        wants = self.region.wants
        outputs = [out for out in node.outputs if out is not None]
        if node.kind == "op" and operation(node) in WINDOWS:
            outputs = [out for out in outputs if self._is_used(out)]
            return all(out in wants for out in outputs)
        return any(out in wants for out in outputs)

    def _is_used(self, value: Value) -> bool:
        used = any(user.index in self._alive for user in value.users)
        return used or value in self._graph.results

    def _pull(self, node: GraphNode) -> None:
        """Take a node into the region whose inputs are shared, none of them cut."""
        wants = self.region.wants
        if node.kind == "op" and operation(node) in WINDOWS:
            for value in node.outputs:
                if value is not None and value not in wants and self._is_used(value):
                    self._want(value, ALIKE)
            return
        if node.kind in (OPAQUE, ATTENTION) or any(
            isinstance(wants.get(one), Cut) for one in node.inputs
        ):
            raise Misfit(f"{node.name or operation(node)} needs the whole of a cut value")
        for value in node.outputs:
            if value is not None:
                self._want(value, ALIKE)

    def _finished(self) -> Region:
        """Linear layers whose input is shared inside are inside too: nothing need be spread."""
        region = self.region
        self._check_dropped()
        for node in self._graph.nodes:
            if (
                node.kind == LINEAR
                and node.inputs[0] in region.wants
                and node.name in region.spread
            ):
                region.spread.discard(node.name)
                region.inside.add(node.name)
        return region

    def _check_dropped(self) -> None:
        """Raise `Misfit` where a rank could not tell whether and where a dropped value is cut.

        It knows what the last layer left, and one dim for each number of dims in a forward.
        """
        for node, is_cut in _dropping(self._graph, self.region, self._rows):
            want = self.region.wants.get(node.inputs[0])
            dim = want.dim if isinstance(want, Cut) else None
            known = self._feature_dims(node)
            if known and (is_cut != (dim is not None) or (is_cut and known != {dim})):
                raise Misfit(f"{node.name or 'the model'} drops values that are cut otherwise")
        for node in _first_again(self._graph, self.region, self._rows):
            if isinstance(self.region.wants.get(node.inputs[0]), Cut):
                raise Misfit(f"a backward draws the mask of {node.name} again, and no layer before")

    def _feature_dims(self, node: GraphNode) -> set[int]:
        """The dims that a rank takes to be cut of what a node drops; empty if it looks at none.

        A module of dropout knows its own word, and a function the words of all modules around it.
        """
        num_dims = len(node.inputs[0].shape)
        if node.func is nn.Dropout:
            return {self.region.dropped.get(node.name, {}).get(num_dims, num_dims - 1)}
        return {
            dims[num_dims]
            for name, dims in self.region.dropped.items()
            if num_dims in dims and (not name or f"{node.name}.".startswith(f"{name}."))
        }

    def entered(self, name: str) -> bool:
        """Whether a column's input is shared inside the region already."""
        return any(
            node.inputs[0] in self.region.wants
            for node in self._graph.nodes
            if node.kind == LINEAR and node.name == name
        )


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


def _first_again(graph: Graph, region: Region, rows: Collection[str]) -> Iterator[GraphNode]:
    """The nodes that drop numbers in code that runs again, before any layer has in that code."""
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


def taken_layers(graph: Graph) -> frozenset[str]:
    """The modules whose parameters an operation outside layers takes, without a call of them."""
    return frozenset(
        value.name.rpartition(".")[0]
        for node in graph.nodes
        for value in node.inputs
        if value.name and node.kind == "op"
    )


def _composed(pieces: Sequence[tuple[int, int, Want]], length: int) -> tuple[Part, ...]:
    """The parts of a dimension from those of its pieces; those without a demand stay whole."""
    parts: list[Part] = []
    position = 0
    for start, stop, want in sorted(set(pieces), key=lambda piece: piece[:2]):
        if start < position:
            raise Misfit("pieces of one value overlap")
        if start > position:
            parts.append((start - position, False))
        parts += want.parts if isinstance(want, Cut) else ((stop - start, False),)
        position = stop
    if position < length:
        parts.append((length - position, False))
    return joined(parts)


def alive(graph: Graph) -> set[int]:
    """The nodes that the output of the model is made of."""
    indices: set[int] = set()
    left: list[PyTree] = [value.node for value in graph.results]
    while left:
        node = left.pop()
        if node is not None and node.index not in indices:
            indices.add(node.index)
            left += [value.node for value in node.inputs]
    return indices
