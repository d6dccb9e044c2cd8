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

from plait.parallel.pipeline.watch import written_tensors
from plait.torch_internals import has_storage, storage_key, storage_of
from plait.values import PyTree


class _Copies(TorchDispatchMode):
    """Copies of parameters, each made before the first operation that writes into it."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._memory = [(param, param.data) for param in params]
        self._unwritten: dict[int, list[Tensor]] = {}
        for _, memory in self._memory:
            self._unwritten.setdefault(storage_key(memory), []).append(memory)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            for memory in self._unwritten.pop(storage_key(tensor), ()):
                self._copies.append((memory, memory.clone()))
        return func(*args, **kwargs)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give each parameter its memory and its numbers again."""
        for param, memory in self._memory:
            if storage_of(param) != storage_of(memory):
                param.data = memory
        for memory, copy in self._copies:
            memory.copy_(copy)


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Leave a model's parameters as they were, whatever its forward does to them."""
    params = model.parameters()
    copies = _Copies(one for one in params if has_storage(one) and not one.is_meta)
    try:
        with copies:
            yield
    finally:
        copies.put_back()
