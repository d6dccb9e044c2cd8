"""One forward as a graph: operations and layers, and which values each makes of which.

Layers run without their weights: a linear layer gives zeros of its output's size. So a model on the
meta device is followed on the host. Its own control flow runs, and no parameter has memory.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plait.models.derived.kinds import DROPOUT, stays_still
from plait.models.derived.stand_ins import (
    DropoutOfFunctions,
    Sizes,
    stand_ins,
    weightless,
    without_fused_forwards,
)
from plait.random_state import IsolatedRandom
from plait.torch_internals import storage_key
from plait.values import PyTree

MADE = {
    *("full", "zeros", "ones", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"),
}
"""Operations whose result is the same number everywhere, or not written yet."""
VIEWS = ("view", "_unsafe_view", "reshape")
CHECKPOINT = "torch/utils/checkpoint.py"


@dataclass(eq=False)
class Value:
    """A tensor of the forward. `name` is that of a parameter; `node` is what made it."""

    shape: tuple[int, ...]
    memory: Hashable
    node: GraphNode | None = None
    output: int = 0
    name: str = ""
    users: list[GraphNode] = field(default_factory=list)


@dataclass(eq=False)
class GraphNode:
    """An operation, or a layer by its kind, name and class. `args` hold values for tensors.

    `repeat` is the number of the call of torch's checkpoint around a layer; 0 outside of any.
    """

    index: int
    kind: str
    func: Any
    args: tuple[PyTree, ...]
    name: str = ""
    outputs: list[Value | None] = field(default_factory=list)
    repeat: int = 0

    @property
    def inputs(self) -> list[Value]:
        """The values among the arguments."""
        return [leaf for leaf in tree_leaves(self.args) if isinstance(leaf, Value)]


class Draw(NamedTuple):
    """An operation that draws random numbers, the module whose code it is, and their shape.

    `is_met`: ranks draw one device's mask, as a word of the table says.
    """

    owner: str
    operation: str
    shape: tuple[int, ...]
    is_met: bool = False


@dataclass
class Graph:
    """The nodes in their order, the values of the output, and memory that was written in place.

    `recomputed`: the modules whose code views or drops in a function that a backward runs again,
    outside of their forward.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    written: set[Hashable] = field(default_factory=set)
    recomputed: set[str] = field(default_factory=set)


Check = Callable[[GraphNode, Sequence[Tensor | None]], None]


def draws(func: OpOverload) -> bool:
    """Whether an operation draws random numbers; attention that does is not one operation."""
    name = str(func._schema.name)
    return torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot" not in name


def taken_layers(graph: Graph) -> frozenset[str]:
    """The modules whose parameters an operation outside layers takes, without a call of them."""
    return frozenset(
        value.name.rpartition(".")[0]
        for node in graph.nodes
        for value in node.inputs
        if value.name and node.kind == "op"
    )


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


class GraphRecorder(TorchDispatchMode):
    """Records every operation outside layers. `check` sees each node with its real outputs."""

    def __init__(self, named: dict[str, nn.Module], check: Check | None = None) -> None:
        super().__init__()
        self.graph = Graph()
        self._values: dict[int, Value] = {}
        self._alive: list[PyTree] = []
        self._paused = False
        self._check = check
        self.names = {module: name for name, module in named.items()}
        self._fresh: set[int] = set()
        self._window_of: dict[int, Tensor] = {}
        self._seen: dict[Hashable, set[int]] = defaultdict(set)
        self._parameters: set[int] = set()
        self._repeats: dict[FrameType, int] = {}

    def name(self, tensor: Tensor, name: str) -> None:
        """Call the value of a tensor [...] a parameter's."""
        self._value(tensor).name = name
        self._parameters.add(storage_key(tensor))

    def _value(self, tensor: Tensor) -> Value:
        key = id(tensor)
        if key not in self._values:
            self._values[key] = Value(tuple(tensor.shape), storage_key(tensor))
            self._alive.append((tensor, tensor.untyped_storage()))
        return self._values[key]

    def end(self, outputs: PyTree) -> None:
        """The model has returned these outputs."""
        self.graph.results = self.values(outputs)

    def values(self, tree: PyTree) -> list[Value]:
        """The values of the tensors in a tree."""
        return [self._value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def layer(
        self, kind: str, module: nn.Module, inputs: Sequence[Tensor], make: Callable[[], PyTree]
    ) -> PyTree:
        """The output of a layer of inputs [...], which `make` gives, as one node."""
        output = self._unrecorded(make)
        self._add(kind, type(module), tuple(inputs), output, self.names[module])
        return output

    def dropout(self, x: Tensor) -> Tensor:
        """The result [...] of a function that drops numbers: a node of the module that calls it."""
        owner, again = self._owner()
        self.graph.draws.append(Draw(owner, "dropout", tuple(x.shape)))
        self.graph.recomputed |= {owner} if again else set()
        output = self._unrecorded(x.clone)
        self._add(DROPOUT, F.dropout, (x,), output, owner)
        return output

    def _unrecorded(self, make: Callable[[], PyTree]) -> PyTree:
        """The result of `make`, of whose operations there are no nodes."""
        self._paused = True
        try:
            return make()
        finally:
            self._paused = False

    def _add(
        self,
        kind: str,
        func: Callable[..., Any] | type[nn.Module],
        args: PyTree,
        output: PyTree,
        name: str = "",
    ) -> None:
        held = tree_map(lambda leaf: self._value(leaf) if isinstance(leaf, Tensor) else leaf, args)
        node = GraphNode(len(self.graph.nodes), kind, func, held, name)
        node.repeat = 0 if kind == "op" else self._repeat()
        self.graph.nodes.append(node)
        for value in dict.fromkeys(node.inputs):
            value.users.append(node)
        leaves = list(output) if isinstance(output, (tuple, list)) else [output]
        flat = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(leaves)]
        for index, leaf in enumerate(flat):
            if leaf is None:
                node.outputs.append(None)
                continue
            value = Value(tuple(leaf.shape), storage_key(leaf), node, index)
            self._values[id(leaf)] = value
            self._seen[value.memory].add(id(leaf))
            self._alive.append((leaf, leaf.untyped_storage()))
            node.outputs.append(value)
        if self._check is not None:
            self._check(node, flat)

    def __torch_dispatch__(  # as torch calls it
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        if func._schema.is_mutable and self._writes_parameter(args):
            return args[0]
        output = func(*args, **(kwargs or {}))
        if self._paused:
            return output
        name = str(func._schema.name).rpartition("::")[2]
        if name == "copy_" and self._assembles(args):
            base = self._window_of[id(args[0])]
            self._add("op", func, ((base, args[1]), {}), base)
            return output
        if func._schema.is_mutable:
            self._write(func, args)
        if draws(func):
            shape = next((tuple(one.shape) for one in tree_leaves(output)), ())
            self.graph.draws.append(Draw(self._owner()[0], name, shape))
        if name in VIEWS:
            owner, again = self._owner()
            self.graph.recomputed |= {owner} if again else set()
        self._add("op", func, (args, kwargs or {}), output)
        if name in MADE:
            self._fresh.add(id(output))
        elif name == "slice":
            self._window_of[id(output)] = args[0]
        return output

    def _owner(self) -> tuple[str, bool]:
        """The innermost module that is called, and whether a checkpoint of torch runs code within
        its forward.

        A method that another module calls is code of that one: no forward of its own runs then.
        """
        again = False
        frame = inspect.currentframe()
        while frame is not None:
            again = again or frame.f_code.co_filename.endswith(CHECKPOINT)
            module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
            if isinstance(module, nn.Module) and module in self.names:
                return self.names[module], again
            frame = frame.f_back
        return "", again

    def _repeat(self) -> int:
        """The number of the innermost call of torch's checkpoint that runs; 0 outside of any."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_filename.endswith(CHECKPOINT):
                return self._repeats.setdefault(frame, len(self._repeats) + 1)
            frame = frame.f_back
        return 0

    def _assembles(self, args: PyTree) -> bool:
        """Whether a copy fills a part of a tensor that was made empty for this."""
        base = self._window_of.get(id(args[0]))
        return base is not None and id(base) in self._fresh

    def _writes_parameter(self, args: PyTree) -> bool:
        """Whether an operation writes into a parameter: its values are none that a graph has."""
        leaf = args[0] if args else None
        return isinstance(leaf, Tensor) and storage_key(leaf) in self._parameters

    def _write(self, func: OpOverload, args: PyTree) -> None:
        """Memory that other values see too is not followed any more."""
        for leaf, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if isinstance(leaf, Tensor) and written and len(self._seen[storage_key(leaf)]) > 1:
                self.graph.written.add(storage_key(leaf))


def run(
    model: nn.Module,
    call: Callable[[], PyTree],
    *,
    sizes: Sizes | None = None,
    check: Check | None = None,
    opaque: Sequence[type] = (),
    in_training: bool = False,
) -> Graph:
    """The graph of `call()`, which runs the model; `sizes` are those of one rank.

    `in_training`: modules run as they are set, but batch norms and dropout, which stay still.
    Random numbers are alike in every run.
    """
    named = dict(model.named_modules())
    recorder = GraphRecorder(named, check)
    training = [module for module in named.values() if module.training]
    for module in training:
        module.training = in_training and not stays_still(module)
    try:
        with (
            without_fused_forwards(named),
            weightless(named, recorder, sizes or Sizes()),
            stand_ins(named, recorder, sizes or Sizes(), opaque),
            torch.no_grad(),
            IsolatedRandom(seed=0),
            DropoutOfFunctions(recorder),
            recorder,
        ):
            recorder.end(call())
    finally:
        for module in training:
            module.training = True
    return recorder.graph
