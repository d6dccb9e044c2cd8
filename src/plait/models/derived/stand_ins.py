"""Stand-ins for weights and layers while a forward is recorded.

A parameter is a row of zeros, and a layer gives zeros of its output's size as one node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.dropout_calls import dropped_by, is_attention, rate_of, shape_of, without_rate
from plait.forwards import with_forwards
from plait.models.derived.kinds import (
    ATTENTION,
    DROPOUT,
    EMBEDDING,
    LINEAR,
    NORM,
    layer_kind,
    out_features,
)
from plait.values import PyTree


class NodeRecorder(Protocol):
    """The taker of the nodes of a forward."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Call the value of a tensor [...] a parameter's."""

    def layer(
        self, kind: str, module: nn.Module, inputs: Sequence[Tensor], make: Callable[[], PyTree]
    ) -> PyTree:
        """The output of a layer of inputs [...], which `make` gives, as one node."""

    def dropout(self, x: Tensor) -> Tensor:
        """The result [...] of a function that drops numbers, as one node."""


class DropoutOfFunctions(TorchFunctionMode):
    """Calls of functions that drop numbers, as nodes: of attention behind what it returns."""

    def __init__(self, recorder: NodeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(  # as torch calls it
        self, func: Callable[..., Any], types: Any, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        named = kwargs or {}
        if not rate_of(func, args, named):
            return func(*args, **named)
        if is_attention(func):
            whole, rest = without_rate(args, named)
            made = func(*whole, **rest)
            has_dims_of_weights = made.shape[:-2] == shape_of(func, args, named)[:-2]
            return self._recorder.dropout(made) if has_dims_of_weights else func(*args, **named)
        return self._recorder.dropout(dropped_by(args, named))


@dataclass(frozen=True)
class Sizes:
    """Sizes on one rank: output features by linear layer, and shapes of parameters."""

    outputs: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@contextmanager
def without_fused_forwards(named: dict[str, nn.Module]) -> Iterator[None]:
    """Torch's encoder layers and attention call their parts, as they do in training.

    In evaluation one fused operation takes the weights of all of them.
    """
    fused = [
        module
        for module in named.values()
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
    ]
    before = [(module, module.training, getattr(module, "dropout", None)) for module in fused]
    for module in fused:
        module.training = True
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    try:
        yield
    finally:
        for module, training, dropout in before:
            module.training = training
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = dropout


@contextmanager
def weightless(named: dict[str, nn.Module], recorder: NodeRecorder, sizes: Sizes) -> Iterator[None]:
    """A row of zeros in the place of every parameter and of every buffer on the meta device."""
    originals: list[tuple[Any, str, Tensor]] = []
    for name, module in named.items():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or (table is module._buffers and not tensor.is_meta):
                    continue
                originals.append((table, key, tensor))
                path = f"{name}.{key}" if name else key
                shape = sizes.shapes.get(path, tuple(tensor.shape))
                zero = torch.zeros(shape[-1:], dtype=tensor.dtype).expand(shape)  # view_as_complex
                if table is module._parameters:
                    recorder.name(zero, path)
                table[key] = zero  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, key, tensor in reversed(originals):  # a module of two names comes twice
            table[key] = tensor


@contextmanager
def stand_ins(
    named: dict[str, nn.Module], recorder: NodeRecorder, sizes: Sizes, opaque: Sequence[type]
) -> Iterator[None]:
    """Forwards of layers that give zeros and are one node each."""
    forwards: list[tuple[nn.Module, Callable[..., PyTree]]] = []
    for name, module in named.items():
        kind = layer_kind(module, opaque)
        if kind is not None:
            out = out_features(module) if kind == LINEAR else 0
            out = sizes.outputs.get(name, out)
            stand_in = _attention if kind == ATTENTION else partial(_forward, kind, out=out)
            forwards.append((module, stand_in(module, recorder)))
    with with_forwards(forwards):
        yield


def _attention(module: Any, recorder: NodeRecorder) -> Callable[..., PyTree]:
    """Torch's attention: zeros of its output, and of the weights of its heads."""
    signature = inspect.signature(module.forward)

    def run_attention(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        query, key = named["query"], named["key"]
        time = 1 if module.batch_first and query.dim() == 3 else 0
        samples = query.shape[1 - time : 2 - time] if query.dim() == 3 else ()
        heads = () if named["average_attn_weights"] else (module.num_heads,)
        shape = (*samples, *heads, query.shape[time], key.shape[time])

        def make() -> tuple[Tensor, Tensor | None]:
            weights = torch.zeros(shape, dtype=query.dtype) if named["need_weights"] else None
            return torch.zeros_like(query), weights

        return recorder.layer(ATTENTION, module, inputs, make)

    return run_attention


def _forward(
    kind: str, module: nn.Module, recorder: NodeRecorder, out: int
) -> Callable[..., PyTree]:
    forward = module.forward
    weight = next((part for part in module._parameters.values() if part is not None), None)
    dtype = torch.get_default_dtype() if weight is None else weight.dtype

    def run_layer(x: Tensor, *args: object, **kwargs: object) -> PyTree:
        inputs = [leaf for leaf in tree_leaves((x, args, kwargs)) if isinstance(leaf, Tensor)]
        if kind == NORM and (args or kwargs or weight is None or x.shape[-1:] != weight.shape):
            return forward(x, *args, **kwargs)
        shape = tuple(x.shape)
        if kind == LINEAR:
            shape = (*shape[:-1], out)
        elif kind == EMBEDDING:
            assert weight is not None
            shape = (*shape, int(weight.shape[-1]))
        if kind == DROPOUT:
            return recorder.layer(kind, module, inputs, x.clone)
        return recorder.layer(kind, module, inputs, lambda: torch.zeros(shape, dtype=dtype))

    return run_layer
