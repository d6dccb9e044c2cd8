"""From `param.grad` to flat buffers: when a bucket's gradients are complete, and where they lie.

The reducer knows *when*: every parameter of a bucket has its gradient, and all buckets before it
have gone. A store knows *where*. Buckets go in one fixed order on every rank, also when a parameter
gets no gradient on some of them. Collectives in different orders would hang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from plait.comm import Axis
from plait.parallel.data.bucket import Bucket

SlotProgress: TypeAlias = tuple[frozenset[int], frozenset[int], frozenset[int]]
"""The slots of a bucket that are stale, touched and direct."""


@dataclass
class BucketState:
    """One bucket during a step: which gradients have come, and the flat buffer that holds them.

    Without a buffer (`grad` is None) gradients lie in `param.grad`, and belong to autograd. From
    `attach` to `detach` the buffer (padded_numel,) holds them, and belongs to this bucket alone.
    `views` are its slots in the shapes of their parameters.
    """

    bucket: Bucket
    index: int
    grad: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    stale: set[int] = field(
        default_factory=set
    )  # slots whose elements in `grad` are still those of an earlier use
    touched: set[int] = field(default_factory=set)  # slots that got a gradient in this step
    direct: set[int] = field(
        default_factory=set
    )  # slots that got one through their main_grad, unknown to the reducer yet
    missing: int = 0  # gradients that the running backward has not brought yet
    start: int = 0  # the element of each rank's shard with which `grad` begins

    def attach(self, grad: Tensor) -> None:
        """Use `grad` (padded_numel,) as the flat buffer of the bucket's gradients; its elements are
        stale.
        """
        self.grad, self.views = grad, self.bucket.views(grad)
        self.stale = set(range(len(self.views)))

    def detach(self) -> None:
        """Forget the flat buffer."""
        self.grad = None
        self.views = []

    def free(self) -> None:
        """Give the memory of the flat buffer back, until `hold`. Its views stay what they are."""
        if self.grad is not None:
            self.grad.untyped_storage().resize_(0)

    def hold(self) -> None:
        """Take memory for the flat buffer again. The elements of parameters are undefined. The
        padding is zero, since norms and sums over ranks read it too.
        """
        if self.grad is not None and not self.grad.untyped_storage().nbytes():
            self._make_room(self.grad)
            if self.bucket.padding:
                self.grad[-self.bucket.padding :].zero_()

    @staticmethod
    def _make_room(flat: Tensor) -> None:
        flat.untyped_storage().resize_(flat.nbytes)

    def progress(self) -> SlotProgress:
        """Which gradients have come."""
        return frozenset(self.stale), frozenset(self.touched), frozenset(self.direct)

    def take_progress(self, progress: SlotProgress) -> None:
        """Go on as if these gradients had come."""
        self.stale, self.touched, self.direct = map(set, progress)

    def zero_stale(self) -> None:
        """Zero the elements that got no gradient, so that a sum over ranks is right."""
        if self.stale:
            self.hold()
        for index in self.stale:
            self.views[index].zero_()
        self.stale.clear()


class MainGrad:
    """The place of one parameter's gradient: what a layer computes is added there, and torch's
    autograd sees no gradient.

    It spares a tensor the size of the weight and two passes over it for every micro-batch.
    """

    __slots__ = ("_index", "_state")

    def __init__(self, state: BucketState, index: int) -> None:
        self._state = state
        self._index = index

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which gradients are added."""
        return self._state.views[self._index].dtype

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [rows, k] @ right [k, columns] to a gradient [rows, columns]."""
        view = self._state.views[self._index]
        state = self._state
        if self._is_first():
            torch.mm(left, right, out=view)
        else:
            view.addmm_(left, right)
        state.touched.add(self._index)

    def add(self, grad: Tensor) -> None:
        """Add a tensor of the parameter's shape [...]."""
        view = self._state.views[self._index]
        state = self._state
        if self._is_first():
            view.copy_(grad)
        else:
            view.add_(grad)
        state.touched.add(self._index)

    def _is_first(self) -> bool:
        """Whether what lies there is of an earlier step."""
        self._state.direct.add(self._index)
        if self._index not in self._state.stale:
            return False
        self._state.hold()
        self._state.stale.discard(self._index)
        return True


class GradientStore(ABC):
    """Where gradients lie between the moment they are computed and the moment they are reduced."""

    @abstractmethod
    def begin_step(self, states: Sequence[BucketState]) -> None:
        """A step begins: the contents of the buffers are stale."""

    @abstractmethod
    def after_backward(self) -> None:
        """A backward has ended, and every bucket of it has been launched."""

    def end_micro_batch(self, states: Sequence[BucketState]) -> None:  # noqa: B027 - most add up
        """A backward that is not the last one of a step has ended."""

    @abstractmethod
    def take(self, state: BucketState, index: int, param: Tensor) -> None:
        """The gradient of slot `index`, `param.grad` in its shape, is complete for this
        micro-batch.
        """

    @abstractmethod
    def collect(self, state: BucketState) -> None:
        """Have the whole bucket's gradients in `state.grad` (padded_numel,), to be reduced."""

    def pieces(self, state: BucketState) -> Iterator[None]:
        """Have a bucket's gradients in `state.grad`, to be reduced each time that it yields.

        It yields once for all of them, or once for each piece of every rank's shard.
        """
        self.collect(state)
        yield

    @property
    @abstractmethod
    def every_backward(self) -> bool:
        """Whether buckets are reduced in every backward, not only in the last one of a step."""

    def main_grad(self, state: BucketState, index: int) -> MainGrad | None:
        """The place where a slot's gradient may be written at any moment of a step. None where
        there is no such place.
        """
        return None


def are_freed(device: torch.device) -> bool:
    """Whether gradients on a device give their memory back to the forward that follows.

    A GPU's allocator keeps it at hand. On processors each page would be made again.
    """
    return device.type != "cpu"


class PersistentGradients(GradientStore):
    """One buffer a bucket for the whole run; micro-batches add up in it, and it is reduced once a
    step.

    On a GPU its memory comes with the first gradient of a step, and goes when the next step begins.
    So activations of the first micro-batch can lie there. With `keeps` it stays.
    """

    every_backward = False

    def __init__(
        self,
        states: Sequence[BucketState],
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps: bool = False,
    ) -> None:
        self._frees = are_freed(device) and not keeps
        for state in states:
            state.attach(axis.empty(state.bucket.padded_numel, dtype, device).zero_())

    def begin_step(self, states: Sequence[BucketState]) -> None:
        for state in states:
            state.stale = set(range(len(state.views)))
            if self._frees:
                state.free()

    def after_backward(self) -> None:
        pass

    def take(self, state: BucketState, index: int, param: Tensor) -> None:
        grad = param.grad
        param.grad = None
        assert grad is not None
        if index in state.stale:
            state.stale.discard(index)
            state.hold()
            state.views[index].copy_(grad)
        else:
            state.views[index].add_(grad)

    def collect(self, state: BucketState) -> None:
        state.zero_stale()

    def main_grad(self, state: BucketState, index: int) -> MainGrad | None:
        return MainGrad(state, index)


class Reducer:
    """Watches gradients come, and launches each bucket's reduction once it is complete and its turn
    has come.

    Between two steps gradients are the caller's. A backward of its own leaves them in `param.grad`,
    as plain torch does, and nothing is sent. The next step begins without them.
    """

    def __init__(
        self,
        states: Sequence[BucketState],
        store: GradientStore,
        launch: Callable[[BucketState], None],
        *,
        eager: bool = True,
    ) -> None:
        """Without `eager` buckets go at the end of a backward, as parts of several are mixed."""
        self.states = states
        self.store = store
        self._eager = eager
        self._launch = launch
        self._next = 0
        self._weight: float | None = None
        self._final = store.every_backward
        self._is_stepping = False
        for state in states:
            for index, slot in enumerate(state.bucket.slots):
                slot.param.register_post_accumulate_grad_hook(self._hook(state, index))

    def main_grads(self) -> dict[int, MainGrad]:
        """Where gradients can be written past torch's autograd, by the id of the parameter."""
        places = (
            (state, index, slot)
            for state in self.states
            for index, slot in enumerate(state.bucket.slots)
        )
        found = (
            (id(slot.param), self.store.main_grad(state, index)) for state, index, slot in places
        )
        return {key: sink for key, sink in found if sink is not None}

    def begin_step(self) -> None:
        """A step begins, without gradients that the caller left behind."""
        self.store.begin_step(self.states)
        self._is_stepping = True
        self._final = self.store.every_backward
        for state in self.states:
            state.touched.clear()
            state.direct.clear()
            for slot in state.bucket.slots:
                slot.param.grad = None
        self._expect()

    def end_step(self) -> None:
        """All gradients of the step have come: those that follow are the caller's."""
        self._is_stepping = False

    def before_last_backward(self, weight: float | None = None) -> None:
        """The next backward is the last of this step: reduce each bucket as soon as it is complete,
        `weight` times.
        """
        self._final = True
        self._weight = weight

    def after_backward(self) -> None:
        """Launch what the backward that just ended left over (buckets with parameters that got no
        gradient).
        """
        if not self._final:
            self.store.end_micro_batch(self.states)
            return
        while self._next < len(self.states):
            self._send(self.states[self._next])
        self._expect()
        self.store.after_backward()

    def _expect(self) -> None:
        self._next = 0
        for state in self.states:
            state.missing = len(state.bucket.slots)

    def _hook(self, state: BucketState, index: int) -> Callable[[Tensor], None]:
        def ready(param: Tensor) -> None:
            if not self._is_stepping:
                return
            if param.grad is not None:
                state.touched.add(index)
                self.store.take(state, index, param)
            elif index not in state.direct:
                return  # torch calls this for a gradient that was left for later, too
            state.direct.discard(index)
            if self._final and self._eager:
                state.missing -= 1
                if state.missing == 0:
                    self._advance()

        return ready

    def _advance(self) -> None:
        while self._next < len(self.states) and self.states[self._next].missing <= 0:
            self._send(self.states[self._next])

    def _send(self, state: BucketState) -> None:
        self._next += 1
        for _ in self.store.pieces(state):
            if self._weight is not None and state.grad is not None:
                state.grad.mul_(self._weight)
            self._launch(state)
