"""Parameters around a forward that only looks: what it writes into them is put back.

MoCo's second encoder follows the first one in the forward, and an ActNorm sets its parameters by
its first samples. A forward of `build` must not do so. Copies are made of what is written alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.torch_internals import has_storage, storage_key, storage_of
from plait.values import PyTree


class ParameterCopies:
    """Copies of parameters, each made before the first operation that writes into it."""

    def __init__(self, model: nn.Module) -> None:
        params = [one for one in model.parameters() if has_storage(one) and not one.is_meta]
        self._memory = [(param, param.data) for param in params]
        self._unwritten: dict[int, list[Tensor]] = {}
        for _, memory in self._memory:
            self._unwritten.setdefault(storage_key(memory), []).append(memory)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def before(self, written: Iterable[Tensor]) -> None:
        """An operation is about to write into tensors [...]."""
        for tensor in written:
            for memory in self._unwritten.pop(storage_key(tensor), ()):
                self._copies.append((memory, memory.clone()))

    @torch.no_grad()
    def put_back(self) -> None:
        """Give each parameter its memory and its numbers again."""
        for param, memory in self._memory:
            if storage_of(param) != storage_of(memory):
                param.data = memory
        for memory, copy in self._copies:
            memory.copy_(copy)


class _WriteWatch(TorchDispatchMode):
    """Has copies made where an operation writes."""

    def __init__(self, copies: ParameterCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        self._copies.before(written_tensors(func, args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Leave a model's parameters as they were, whatever its forward does to them."""
    copies = ParameterCopies(model)
    try:
        with _WriteWatch(copies):
            yield
    finally:
        copies.put_back()


def tensors_of(values: PyTree) -> list[Tensor]:
    """The tensors [...] of values that have memory."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and has_storage(leaf)]


def written_tensors(func: OpOverload, args: PyTree, kwargs: PyTree) -> Iterator[Tensor]:
    """The tensors [...] that an operation writes in place."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def is_in_parameter(tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor [...] lies in the memory of a parameter of a module."""
    key = storage_key(tensor)
    return any(storage_key(param) == key for param in module.parameters())
