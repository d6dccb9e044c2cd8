"""Operations of one module in a forward, in order, and the tensors that autograd saves; usually on
the meta device.

Layers with weights are counted as a whole by hooks, attention by its function. Other matrix
products and everything elementwise are counted by their operators. Between a column and its row a
tensor axis divides what is there: that region is "heads".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from plait.predict.cost.model.operations import (
    Attention,
    Elementwise,
    Lookup,
    Matmul,
    Operation,
    Split,
)
from plait.predict.cost.model.torch_attention import (
    arguments,
    is_torch_attention,
    operations_of,
)
from plait.predict.cost.model.with_values import state_of
from plait.stateless import call_with
from plait.values import AutogradContext, PyTree

if TYPE_CHECKING:
    from torch import Tensor, nn

COLUMNS = ("column", "column_inside", "qkv")
"""Roles of linear layers whose cut outputs stay where they are."""
SPLITS: dict[str, Split] = {
    **dict.fromkeys((*COLUMNS, "head"), "column"),
    "row": "row",
}
"""Split that a role gives a linear layer."""

NORMS = {
    "LayerNorm": 2,
    "RMSNorm": 1,
    "GroupNorm": 0,
    "BatchNorm1d": 0,
    "BatchNorm2d": 0,
    "BatchNorm3d": 0,
}
"""Numbers of each token that a norm tells others where features are cut."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class OperationWatch:
    """Watches a module while it runs; `roles` by the identity of modules, `tokens` in what it is
    given.
    """

    def __init__(self, tokens: float, roles: Mapping[int, str]) -> None:
        self.tokens = tokens
        self.roles = roles
        self.operations: list[Operation] = []
        self.saved: dict[str, float] = {}
        """Numbers that autograd keeps, by region; `masks` are bytes."""
        self.gathered = 0.0
        self.counted = 0
        """Parameters that the operations have."""
        self._inside = False
        self._layers = 0
        self._moved: dict[Split, list[float]] = {}
        self._seen: dict[int, object] = {}
        self._column: tuple[int, int] = (-1, -1)

    def run(
        self,
        module: nn.Module,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        *,
        real: bool = False,
    ) -> PyTree:
        """The output of the module, on the meta device or with values
        (`plait.predict.cost.model.with_values`).
        """
        import torch

        from plait.torch_internals import storage_key

        self._inside = self._role(module) == "row"  # what a row alone is given is divided
        state = state_of(module, real=real)
        for tensor in state.values():  # weights are no activations
            self._seen[storage_key(tensor)] = tensor
        hooks = [
            hook for layer in module.modules() if is_layer(layer) for hook in self._hooks(layer)
        ]
        hooks += [
            layer.register_forward_hook(self._leave_row)
            for layer in module.modules()
            if self._role(layer) == "row"
        ]
        hooks += [
            hook
            for layer in module.modules()
            if is_torch_attention(layer)
            for hook in self._attention_hooks(layer)
        ]
        try:
            with (
                _functions(self),
                _operators(self),
                torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x),
            ):
                return call_with(module, state, args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def elementwise(self) -> list[Operation]:
        """Numbers read and written outside of layers, for each token."""
        return [
            Elementwise("elementwise", reads / self.tokens, writes / self.tokens, split)
            for split, (reads, writes) in self._moved.items()
        ]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> None:
        """A fused attention: [..., heads, queries, width]; the whole square of keys counts."""
        heads, kv_heads = (x.shape[-3] if x.dim() > 3 else 1 for x in (query, key))
        self.operations.append(
            Attention("attention", heads, kv_heads, query.shape[-1], value.shape[-1], causal)
        )

    def operator(self, name: str, given: list[PyTree], made: list[PyTree]) -> None:
        """An operator below all layers: a product without weights of its own, or numbers that
        move.
        """
        if self._layers:
            return
        if name in PRODUCTS and len(given) > 1:
            left, right = given[-2:]
            rows = left.numel() / left.shape[-1] / self.tokens
            weight = next((x for x in (left, right) if x.is_leaf and x.requires_grad), None)
            self.counted += 0 if weight is None else weight.numel()
            self.operations.append(
                Matmul(
                    "product",
                    left.shape[-1],
                    right.shape[-1],
                    "none",
                    rows=rows,
                    weightless=weight is None,
                )
            )
            return
        moved = self._moved.setdefault(self._region, [0.0, 0.0])
        moved[0] += sum(x.numel() for x in given)
        moved[1] += sum(x.numel() for x in made)

    @property
    def _region(self) -> Split:
        return "heads" if self._inside else "none"

    def _role(self, layer: Any) -> str:
        """The word of a role, without the parts of a packed layer behind it."""
        return self.roles.get(id(layer), "").partition(" ")[0]

    def _hooks(self, layer: Any) -> list[PyTree]:
        def enter(*_: object) -> None:
            self._layers += 1

        def leave(
            layer: Any, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], out: PyTree
        ) -> None:
            self._layers -= 1
            self._layer(layer, next(tensors_in((args, kwargs)), None), out)

        return [
            layer.register_forward_pre_hook(enter),
            layer.register_forward_hook(leave, with_kwargs=True),
        ]

    def _attention_hooks(self, layer: Any) -> list[PyTree]:
        """Torch's attention is counted as a whole: its functions are not seen from outside."""

        def enter(layer: Any, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> None:
            given = arguments(layer, args, kwargs)
            is_split = self._role(layer) == "heads"
            found = operations_of(layer, given, self.tokens, is_split=is_split)
            self.operations += found
            self.counted += sum(p.numel() for p in layer.parameters())
            inputs = dict.fromkeys(given[name] for name in ("query", "key", "value"))
            for x in inputs:
                self._save(x)  # every rank keeps the whole of it
                self.gathered += x.numel() if is_split else 0
            self._inside = is_split
            self._layers += 1

        def leave(*_: object) -> None:
            self._layers -= 1
            self._inside = False

        return [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]

    def _leave_row(self, *_: object) -> None:
        self._inside = False

    def _layer(self, layer: Any, x: PyTree, out: PyTree) -> None:
        kind = type(layer).__name__
        role = self._role(layer)
        num_parameters = sum(p.numel() for p in layer.parameters(recurse=False))
        self.counted += num_parameters
        if hasattr(layer, "num_embeddings") and role in {"", "replicated", "embedding"}:
            split: Split = "column" if role == "embedding" else "none"
            table = Lookup(kind, layer.num_embeddings, layer.embedding_dim, split)
            self.operations.append(table)
        elif x is not None and hasattr(layer, "in_features"):
            self._linear(layer, role, x, out)
        elif x is not None and kind.startswith("Conv"):
            inputs = layer.weight.numel() // layer.weight.shape[0]
            rows = _numbers_in(out) / layer.weight.shape[0] / self.tokens
            self.operations.append(
                Matmul(
                    kind,
                    inputs,
                    layer.weight.shape[0],
                    rows=rows,
                    bias=layer.bias is not None,
                    raw=not x.requires_grad,
                    convolution=True,
                )
            )
        else:
            reads = _numbers_in(x) / self.tokens
            writes = _numbers_in(out) / self.tokens
            name = "norm" if kind in NORMS else kind
            self.operations.append(
                Elementwise(name, reads, writes, "sequence", num_parameters, NORMS.get(kind, 0))
            )

    def _linear(self, layer: Any, role: str, x: PyTree, out: PyTree) -> None:
        split = SPLITS.get(role, "none")
        rows = x.numel() / layer.in_features / self.tokens
        bias = layer.bias is not None
        name = "head" if role == "head" else "linear"
        raw = not x.requires_grad
        one = Matmul(name, layer.in_features, layer.out_features, split, rows, bias, raw=raw)
        if split == "column":
            self._inside = role in COLUMNS
            before, index = self._column
            earlier = self.operations[index] if before == id(x) else None
            if isinstance(earlier, Matmul):  # the same input moves once
                parts = (*(earlier.parts or (earlier.outputs,)), layer.out_features)
                self.operations[index] = Matmul(
                    earlier.name,
                    earlier.inputs,
                    sum(parts),
                    split,
                    rows,
                    bias or earlier.bias,
                    parts=parts,
                    raw=raw,
                )
                return
            self._column, self._seen[-id(x)] = (
                (id(x), len(self.operations)),
                x,
            )  # kept, so that its identity stays its own
            self.gathered += x.numel()
        self.operations.append(one)

    def _save(self, tensor: Tensor) -> PyTree:
        """Autograd keeps a tensor: counted once for each memory."""
        from plait.torch_internals import storage_key

        key_of_memory = storage_key(tensor)
        if key_of_memory not in self._seen:
            self._seen[key_of_memory] = tensor
            numbers = tensor.untyped_storage().nbytes() / tensor.element_size()
            key = self._region if tensor.is_floating_point() else "masks"
            self.saved[key] = self.saved.get(key, 0.0) + numbers * (
                1 if tensor.is_floating_point() else tensor.element_size()
            )
        return tensor


def is_layer(module: nn.Module) -> bool:
    """Whether it is counted as a whole: it owns weights and holds no other modules."""
    return (
        not list(module.children())
        and bool(list(module.parameters(recurse=False)))
        and hasattr(module, "weight")
    )


def tensors_in(tree: PyTree) -> Iterator[Tensor]:
    """All tensors, of any shape, of a tree, and those that are fields of a dataclass in it."""
    import torch
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_in(list(vars(leaf).values()))


def _numbers_in(tree: PyTree) -> int:
    return sum(x.numel() for x in tensors_in(tree))


@contextlib.contextmanager
def _functions(watch: OperationWatch) -> Iterator[None]:
    """Fused attention by its function: on the meta device it would take whichever kernel there
    is.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Fused(torch.autograd.Function):
        """Keeps what a fused kernel keeps: inputs, output, one number for each row of scores."""

        @staticmethod
        def forward(ctx: AutogradContext, *qkv: Tensor) -> PyTree:
            query, key, value = qkv
            out = torch.empty(
                *query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device
            )
            ctx.save_for_backward(query, key, value, out, out.new_empty(out.shape[:-1]))
            return out

        @staticmethod
        def backward(ctx: AutogradContext, *grads: object) -> PyTree:
            return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])

    class WatchFunctions(TorchFunctionMode):
        def __torch_function__(
            self,
            function: Callable[..., PyTree],
            types: object,
            args: PyTree = (),
            kwargs: PyTree = None,
        ) -> PyTree:
            kwargs = kwargs or {}
            if function is torch.nn.functional.scaled_dot_product_attention:
                query, key, value = (
                    *args,
                    *(kwargs[name] for name in ("query", "key", "value")[len(args) :]),
                )[:3]
                watch.attention(
                    query, key, value, causal=bool(kwargs.get("is_causal", False)) or len(args) > 3
                )
                return Fused.apply(query, key, value)
            return function(*args, **kwargs)

    with WatchFunctions():
        yield


@contextlib.contextmanager
def _operators(watch: OperationWatch) -> Iterator[None]:
    """Every operator that writes new memory."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from plait.torch_internals import storage_key

    class WatchOperators(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            function: Any,
            types: object,
            args: PyTree = (),
            kwargs: PyTree = None,
        ) -> PyTree:
            out = function(*args, **(kwargs or {}))
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            old = {storage_key(x) for x in inputs}
            outputs = [
                x
                for x in tree_leaves(out)
                if isinstance(x, torch.Tensor) and storage_key(x) not in old
            ]
            if outputs:
                watch.operator(function.overloadpacket.__name__, inputs, outputs)
            return out

    with WatchOperators():
        yield
