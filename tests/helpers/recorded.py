"""A CUDA graph on a processor: operations are recorded by torch's dispatcher, and done again.

As on a GPU, recording changes no tensor, and what it makes holds nothing before a replay. A replay
does the same operations on the same memory, with the numbers of the host that recording has seen.
So a learning rate, a scale or a tensor made anew that should follow the step shows as a wrong
value. Reads by the host and numbers that come from it are refused, as a GPU refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default: "the host reads a value",
    aten.nonzero.default: "the host reads a size",
    aten.masked_select.default: "the host reads a size",
    aten.equal.default: "the host reads a value",
    aten.lift_fresh.default: "a number of the host goes to the device",
}
MUTABLE_UNSAID = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
"""They write running statistics, which their schema does not say."""
POISON = 0x7F
"""The byte of memory that nothing has written: no number in bf16 and floats, or a large one."""


class RecordedOnHost:
    """A recorder of steps for one thread of a processor.

    Attributes:
        graphs: the operations of each graph.
    """

    def __init__(self) -> None:
        self.graphs: list[Operations] = []
        self._is_beside = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._is_beside = True
        try:
            yield
        finally:
            self._is_beside = False

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        assert self._is_beside, "a graph is recorded in its own stream"
        operations = Operations()
        try:
            with operations:
                work()
        finally:
            operations.undo()
        operations.poison()
        self.graphs.append(operations)
        return operations.replay


class Operations(TorchDispatchMode):
    """The operations that are done while it is entered, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._done)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in REFUSED:
            raise RuntimeError(
                f"operation not permitted while a graph is recorded: {REFUSED[func]}"
            )
        named = kwargs or {}
        given = [one for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
        if func._schema.is_mutable or func in MUTABLE_UNSAID:
            self._keep(given)
        known = {_place(one) for one in given}
        out = func(*args, **named)
        new = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        new = [one for one in new if _place(one) not in known]
        for one in new:
            self._made[_place(one)] = one
        self._done.append((func, args, named, new))
        return out

    def _keep(self, given: Sequence[Tensor]) -> None:
        """Keep memory from before the recording that an operation may change."""
        for one in given:
            place = _place(one)
            if place not in self._made and place not in self._before:
                flat = _bytes(one)
                self._before[place] = flat, flat.clone()

    def undo(self) -> None:
        """Give memory from before the recording what it held then."""
        for flat, before in self._before.values():
            flat.copy_(before)

    def poison(self) -> None:
        """Leave nothing in the memory of the graph."""
        for one in self._made.values():
            _bytes(one).fill_(POISON)

    @torch.no_grad()
    def replay(self) -> None:
        """Do all operations again. Memory that the graph made is overwritten, never replaced."""
        for func, args, named, made in self._done:
            out = [one for one in tree_leaves(func(*args, **named)) if isinstance(one, Tensor)]
            again = [one for one in out if made and _is_fresh(one, args, named)]
            for place, value in zip(made, again, strict=True):
                place.detach().copy_(value)


def _is_fresh(one: Tensor, args: Sequence[Any], named: dict[str, Any]) -> bool:
    given = (leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor))
    return _place(one) not in {_place(leaf) for leaf in given}


def _place(one: Tensor) -> int:
    return one.untyped_storage()._cdata


def _bytes(one: Tensor) -> Tensor:
    """All memory of a tensor's storage [num_bytes]."""
    return torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
