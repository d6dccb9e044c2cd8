"""Demands of row layers whose inputs are cut, on everything before them.

The demand goes backward through operations until it meets linear layers. One that makes a cut value
becomes a column. One that makes a value which ranks share between cut ones spreads it. All between
is inside: its gradients are partial sums over the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from plait.models.derived.cuts import ALIKE, Cut, Misfit, Want, composed, even, in_words
from plait.models.derived.kinds import (
    ATTENTION,
    DROPOUT,
    EMBEDDING,
    LINEAR,
    NORM,
    OPAQUE,
    is_known_norm,
)
from plait.models.derived.record import Graph, GraphNode, Value, alive, taken_layers
from plait.models.derived.region import Region, check_dropped, in_backward_again, whose
from plait.models.derived.rules import ask, chosen, operation, through_window

MOST_PULLED = 400
WINDOWS = ("slice", "split", "split_with_sizes", "narrow")


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
            raise Misfit(_taken(min(taken)))
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
        raise Misfit(
            "operations that use what its inputs are made of reach too far: each of "
            f"{MOST_PULLED} rounds found more"
        )

    def _want(self, value: Value, want: Want) -> None:
        if isinstance(want, Cut) and any(cut and n % self._size for n, cut in want.parts):
            parts = " + ".join(str(n) for n, _ in want.parts)
            raise Misfit(
                f"{self._size} ranks do not divide the {parts} numbers of dimension {want.dim} of "
                f"{list(value.shape)}"
            )
        if value.memory in self._graph.written and isinstance(want, Cut):
            raise Misfit(
                f"the forward writes in place into memory with {want.of(value.shape)}; let it make "
                "a new tensor instead"
            )
        if (known := self._direct.setdefault(value, want)) != want:
            raise Misfit(_unlike(f"a tensor {list(value.shape)}", (known, want)))
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
            raise Misfit(
                "an input of the model, or a tensor that its code makes of no other, would be "
                f"{in_words(want)}: its shape is {list(value.shape)}"
            )
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
            wants.append(Cut(dim, composed(pieces, value.shape[dim])))
        if len(set(wants)) != 1:
            raise Misfit(_unlike(f"a tensor {list(value.shape)}", wants))
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
            kind = getattr(node.func, "__name__", node.func)
            raise Misfit(
                f"'{node.name}' ({kind}) gives every rank its whole output, and the layer behind "
                "it takes a part"
            )
        last = isinstance(want, Cut) and want.dim == len(out.shape) - 1
        if node.kind == LINEAR:
            self._linear(node, want, last=last)
        elif node.kind == DROPOUT:
            self._dropout(node, want)
        elif node.kind == EMBEDDING:
            if isinstance(want, Cut) and not (last and len(want.parts) == 1):
                raise Misfit(
                    f"the embedding '{node.name}' would give {want.of(out.shape)}; only its "
                    "features can be cut, in one part"
                )
            (self.region.tables if last else self.region.inside).add(node.name)
        elif node.kind == NORM:
            if last:
                assert isinstance(want, Cut)
                if len(want.parts) > 1 or not is_known_norm(node.func):
                    raise Misfit(
                        f"'{node.name}' ({node.func.__name__}) norms {want.of(out.shape)}; an "
                        "nn.LayerNorm or nn.RMSNorm alone can, and features in one part"
                    )
                self.region.norms.add(node.name)
            else:
                self.region.inside.add(node.name)
            self._want(node.inputs[0], want)

    def _dropout(self, node: GraphNode, want: Want) -> None:
        """Numbers are dropped by one device's mask, of which a rank cuts its part."""
        value = node.inputs[0]
        if isinstance(want, Cut):
            if len(want.parts) > 1:
                raise Misfit(
                    f"the dropout of {whose(node.name)} gets a tensor {list(value.shape)} that is "
                    f"{in_words(want)}, and a rank cuts one part alone of its mask"
                )
            if node.name in self._graph.recomputed:
                where = "outside of its forward, where a rank would draw another mask"
                raise Misfit(in_backward_again(node.name, where))
            if node.func is not nn.Dropout or want.dim < len(value.shape) - 1:
                dims = self.region.dropped.setdefault(node.name, {})
                dims.setdefault(len(value.shape), want.dim)
        elif node.func is nn.Dropout:
            raise Misfit(
                f"'{node.name}' (nn.Dropout) gets a tensor {list(value.shape)} that every rank has "
                "whole, behind a layer that leaves each rank a part, and would cut its mask too"
            )
        self._want(value, want)

    def _linear(self, node: GraphNode, want: Want, *, last: bool) -> None:
        if node.name in self._rows:
            raise Misfit(
                f"'{node.name}' would be a row, which gives every rank the whole output, and the "
                "layer behind it takes a part"
            )
        if isinstance(want, Cut):
            if not last:
                shape = node.inputs[0].shape
                raise Misfit(
                    f"the linear layer '{node.name}' of inputs {list(shape)} would give an output "
                    f"{in_words(want)}; it can be cut along its last dimension alone"
                )
            if node.name in self._taken:
                raise Misfit(_taken(node.name))
            if (known := self.region.columns.setdefault(node.name, want)) != want:
                raise Misfit(_unlike(f"'{node.name}'", (known, want)))
        else:
            self.region.spread.add(node.name)

    def _leaks(self) -> list[GraphNode]:
        """Nodes that use a wanted value and are not of the region, though the output needs them."""
        wants = self.region.wants
        leaks: dict[int, GraphNode] = {}
        for value in wants:
            if value in self._graph.results:
                raise Misfit(
                    f"the model's output {list(value.shape)} would be {in_words(wants[value])}"
                )
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
        want = self.region.wants[value]
        if is_column and isinstance(want, Cut):
            raise Misfit(
                f"'{node.name}' would be cut by its output features, and needs the whole of "
                f"{want.of(value.shape)}"
            )

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
        cuts = [(want, one) for one in node.inputs if isinstance(want := wants.get(one), Cut)]
        if node.kind in (OPAQUE, ATTENTION) or cuts:
            whom = f"'{node.name}'" if node.name else operation(node)
            if not cuts:
                raise Misfit(f"{whom} stands between a column and its row, where it cannot be")
            want, value = cuts[0]
            raise Misfit(f"{whom} needs the whole of {want.of(value.shape)}")
        for value in node.outputs:
            if value is not None:
                self._want(value, ALIKE)

    def _finished(self) -> Region:
        """Linear layers whose input is shared inside are inside too: nothing need be spread."""
        region = self.region
        check_dropped(self._graph, region, self._rows)
        for node in self._graph.nodes:
            if (
                node.kind == LINEAR
                and node.inputs[0] in region.wants
                and node.name in region.spread
            ):
                region.spread.discard(node.name)
                region.inside.add(node.name)
        return region

    def entered(self, name: str) -> bool:
        """Whether a column's input is shared inside the region already."""
        return any(
            node.inputs[0] in self.region.wants
            for node in self._graph.nodes
            if node.kind == LINEAR and node.name == name
        )


def _taken(name: str) -> str:
    return f"the forward uses the weight of '{name}' outside of a call of it, as by F.linear"


def _unlike(whose: str, wants: Iterable[Want]) -> str:
    ways = sorted({in_words(want) for want in wants})
    return f"two uses of {whose} need it in two ways: {' and '.join(ways)}"
