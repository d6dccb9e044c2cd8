"""The random state of the process, which ranks share when they are threads."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.held import own_attributes

_Generator = tuple[Callable[[], Any], Callable[[Any], object]]  # reads a state, and sets it
_OTHERS = frozenset({dict, set, list, tuple, str, int, float, bool, type(None)})
_DRAWING = threading.RLock()


@contextmanager
def seeding() -> Iterator[None]:
    """Change the process's generator while no rank that is a thread draws its start from it."""
    with _DRAWING:
        yield


def state_of_host() -> Tensor:
    """A copy of the state of the process's generator: (num_bytes,) uint8.

    torch locks the generator while it makes the copy. A collection of garbage there can let another
    thread run. Without a lock here that thread could wait for torch's for ever.
    """
    with _DRAWING:
        return torch.get_rng_state()


def set_state_of_host(state: Tensor) -> None:
    """Set the state (num_bytes,) uint8 of the process's generator."""
    with _DRAWING:
        torch.set_rng_state(state)


@contextmanager
def drawn_alone(seed: int) -> Iterator[None]:
    """Draw on the host from a seed, and leave its random state unchanged.

    Ranks that are threads share the process's generator, so they do this one after another. What is
    done here must not wait for another rank; `IsolatedRandom` is for code that may.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        # torch.manual_seed asks every kind of device; values are drawn on the host alone.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def numpys_own() -> Iterator[None]:
    """Leave the state of numpy's generator unchanged, which takes about 70 us."""
    numbers = _numpys()
    if numbers is None:
        yield
        return
    with _DRAWING:
        users = numbers.get_state(legacy=False)
    try:
        yield
    finally:
        with _DRAWING:
            numbers.set_state(users)


def seed_numpy(seed: int) -> None:
    """Start numpy's draws from a seed, within `numpys_own`.

    Does nothing without numpy, or where the user gave it a generator of another kind.
    """
    numbers = _numpys()
    if numbers is not None and isinstance(numbers.get_bit_generator(), numbers.MT19937):
        with _DRAWING:
            numbers.seed(seed % 2**32)


def _numpys() -> Any:
    """numpy's module of random numbers, which numpy loads late; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


class Draws:
    """The states of Python's and numpy's generators, and of some others, as they are now.

    Recomputation by torch repeats torch's own numbers alone.
    """

    def __init__(self, generators: Iterable[_Generator]) -> None:
        self._held = [(read, set_state, read()) for read, set_state in generators]

    @classmethod
    def of(cls, block: nn.Module) -> Draws:
        """The states of these, and of generators in attributes of the block or its submodules."""
        return cls(_generators_beside_torchs(block))

    def now(self) -> Draws:
        """States of the same generators as they are by now."""
        return Draws((read, set_state) for read, set_state, _ in self._held)

    def put_back(self) -> None:
        """Let all draw from here on what they drew then."""
        for _, set_state, state in self._held:
            set_state(state)


def _generators_beside_torchs(block: nn.Module) -> Iterator[_Generator]:
    """Python's generator, numpy's where it is loaded, and those of the block's modules."""
    yield random.getstate, random.setstate
    numbers = _numpys()
    if numbers is not None:
        yield functools.partial(numbers.get_state, legacy=False), numbers.set_state
    for value in own_attributes(block).values():
        if type(value) not in _OTHERS:
            yield from _generator(value, numbers)


def _generator(value: object, numbers: Any) -> Iterator[_Generator]:
    """Functions that read and set the state of a generator; none for another object."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield value.getstate, value.setstate
    elif isinstance(value, torch.Generator):
        yield value.get_state, value.set_state
    elif numbers is not None and isinstance(value, numbers.RandomState):
        yield functools.partial(value.get_state, legacy=False), value.set_state
    elif numbers is not None and isinstance(value, numbers.Generator):
        bits = value.bit_generator
        yield functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")


class IsolatedRandom(TorchDispatchMode):
    """A random stream of this thread alone: operations on the host draw from it, from a seed on.

    The process's generator stays as it is, except within one operation. So the code may meet other
    ranks that are threads. A rank that draws initial values at the same time is not disturbed.
    `num_draws` counts the operations that have drawn.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._state = torch.Generator().manual_seed(seed).get_state()
        self.num_draws = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not draws or named.get("generator") is not None:
            return func(*args, **named)
        with _DRAWING:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self._state)
            try:
                return func(*args, **named)
            finally:
                after = torch.default_generator.get_state()
                torch.default_generator.set_state(before)
                self.num_draws += not torch.equal(after, self._state)
                self._state = after
