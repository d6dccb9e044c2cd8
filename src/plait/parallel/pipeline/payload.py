"""The payload from one stage to the next: tensors, and a note that says how to assemble them.

The note and the shapes are sent once and remembered; see `transport`. Random numbers of a
micro-batch go on in each stage where the stage before stopped. So dropout is the same under every
plan. Their state travels only if a stage has drawn from it.
"""

from __future__ import annotations

import random as pythons
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_leaf

from plait.errors import ModelError
from plait.random_state import seed_numpy, seeding, set_state_of_host, state_of_host
from plait.values import PyTree

SENDABLE = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


@dataclass
class Payload:
    """Tensors [...] between two stages, for one micro-batch.

    `note` is small, picklable, and the same whenever the inputs of the model have the same shapes.
    `restore` puts the random state back to where the stage before left it. `random` is that state,
    (num_bytes,) uint8, if it is not the state of now. `sources` are the names of the modules that
    made the tensors, for refusals. `unread` are the places of numbers that at most the loss reads.
    """

    tensors: list[Tensor]
    note: PyTree = None
    restore: Callable[[], None] = field(default=lambda: None)
    random: Tensor | None = None
    sources: tuple[str, ...] = ()
    unread: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype that a receiver must know of a tensor.

    `order`: its dims as they lie in memory, the slowest first. What draws random numbers for a
    tensor draws them in this order, so it is the receiver's too. `wire`: the type in which it
    travels, where that is another.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = field(default=(), compare=False)
    wire: torch.dtype | None = None

    @classmethod
    def of(cls, tensor: Tensor, wire: torch.dtype | None = None) -> TensorForm:
        """The form of a tensor [...] that is to be sent, in the narrower type `wire` where it is
        trained through.
        """
        narrower = (
            wire is not None
            and tensor.requires_grad
            and tensor.is_floating_point()
            and tensor.dtype.itemsize > wire.itemsize
        )
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            memory_order(tensor),
            wire if narrower else None,
        )

    def empty(self, device: torch.device) -> Tensor:
        """Uninitialised memory of this form, contiguous. Its dims [...] are those of `shape` in the
        order of memory.
        """
        shape = [self.shape[dim] for dim in self.order] or self.shape
        return torch.empty(shape, dtype=self.wire or self.dtype, device=device)

    def lay(self, tensor: Tensor) -> Tensor:
        """The tensor [...] of this form with its dims in the order of memory, in the type that
        travels. A view, where that is its own.
        """
        laid = tensor.permute(self.order) if self.order else tensor
        return laid if self.wire is None else laid.to(self.wire)

    def restore(self, memory: Tensor) -> Tensor:
        """The tensor of this form whose `lay` is `memory` [...]: a view, but for what a narrower
        type has rounded.
        """
        if self.wire is not None:
            memory = memory.to(self.dtype)
        if not self.order:
            return memory
        return memory.permute([self.order.index(dim) for dim in range(memory.dim())])


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dims of a tensor [...] as they lie in memory, the slowest first; empty where it is
    contiguous.
    """
    if tensor.is_contiguous():
        return ()
    strides = torch.empty_like(tensor, device="meta").stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return () if order == tuple(range(tensor.dim())) else order


@dataclass(frozen=True)
class Nesting:
    """The nesting of a value without its leaves: a `TreeSpec` of torch that can be pickled.

    `kind` and `context` are those of the spec, None for a leaf.
    """

    kind: type | None
    context: object
    children: tuple[Nesting, ...]

    @classmethod
    def of(cls, spec: TreeSpec) -> Nesting:
        """The nesting of a spec."""
        if spec.is_leaf():
            return cls(None, None, ())
        return cls(spec.type, spec.context, tuple(map(cls.of, spec.children())))

    def value(self, leaves: Iterable[object]) -> PyTree:
        """The value with these leaves, in the order of `tree_flatten`."""
        return tree_unflatten(leaves, self._spec)

    @cached_property
    def _spec(self) -> TreeSpec:
        if self.kind is None:
            return treespec_leaf()
        return TreeSpec(self.kind, self.context, [child._spec for child in self.children])

    def __reduce__(self) -> tuple[type[Nesting], tuple[object, ...]]:
        return Nesting, (self.kind, self.context, self.children)


def pack(value: object, what: str) -> Payload:
    """Any nesting of tensors [...] (and None) as a payload; `what` names its maker.

    Raises:
        ModelError: a leaf that cannot be sent.
    """
    leaves, structure = tree_flatten(value)
    for leaf in leaves:
        if leaf is not None:
            check_sendable(leaf, what)
    present = tuple(leaf is not None for leaf in leaves)
    return Payload([leaf for leaf in leaves if leaf is not None], (Nesting.of(structure), present))


def unpack(payload: Payload) -> object:
    """The value that `pack` made the payload from."""
    nesting: Nesting
    nesting, present = payload.note
    tensors = iter(payload.tensors)
    return nesting.value([next(tensors) if there else None for there in present])


def check_sendable(leaf: object, what: str) -> None:
    """Raise `ModelError` unless `leaf` is a dense tensor of a dtype that travels."""
    if not isinstance(leaf, Tensor):
        raise ModelError(
            f"{what} returns a {type(leaf).__name__} where a stage ends; only tensors, and any "
            "nesting of them, can be sent to "
            "the next stage: cut elsewhere (counts, splits), or keep the value inside a block"
        )
    if leaf.layout is not torch.strided or leaf.dtype not in SENDABLE:
        kind = str(leaf.dtype if leaf.dtype not in SENDABLE else leaf.layout).removeprefix("torch.")
        raise ModelError(
            f"{what} returns a {kind} tensor where a stage ends, which cannot be sent; cut "
            "elsewhere (counts, splits)"
        )


class RandomState:
    """The generator that layers draw from on one device.

    `is_own`: no other rank draws from it. The state of a shared one says nothing of this rank, so
    it does not travel.
    """

    def __init__(self, device: torch.device, *, is_own: bool = True) -> None:
        self._device = device
        self._is_own = is_own
        self._fresh = torch.empty(0, dtype=torch.uint8)
        self._stays = False

    def seed(self, seed: int) -> Tensor:
        """Start from a seed, Python's and numpy's numbers too; returns the state that this gives:
        (num_bytes,) uint8.
        """
        if self._stays:
            return self._fresh
        pythons.seed(seed)
        seed_numpy(seed)
        with seeding():
            # torch.manual_seed asks every kind of device, and takes half a millisecond.
            torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        self._fresh = get_state(self._device)
        return self._fresh

    @contextmanager
    def unseeded(self) -> Iterator[None]:
        """Leave the state as it is, whatever seeds come."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False

    @property
    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since the last seed."""
        return not torch.equal(get_state(self._device), self._fresh)

    def pack(self, payload: Payload, fresh: Tensor) -> None:
        """Let the state travel with a payload if it is not `fresh`, (num_bytes,) uint8,
        any more.
        """
        state = get_state(self._device) if payload.random is None else payload.random
        drawn = self._is_own and not torch.equal(state, fresh)
        if drawn:
            payload.tensors.append(state.to(self._device))
        payload.note = (payload.note, drawn)

    def unpack(self, payload: Payload) -> None:
        """Take the state out of a payload. `payload.restore` goes on from it."""
        payload.note, drawn = payload.note
        if drawn:
            state = payload.tensors.pop().cpu()
            payload.restore = lambda: self._set(state)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            set_state_of_host(state)


def get_state(device: torch.device) -> Tensor:
    """A copy of the state of the default generator of a device: (num_bytes,) uint8, on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else state_of_host()
