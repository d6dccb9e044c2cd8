"""The random state of the process, which ranks share when they are threads."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_States = list[tuple[Callable[[Any], object], Any]]  # of generators: a setter, and what it sets
_DRAWING = threading.RLock()
_OF_NUMPY: list[Any] = []  # generators that no `numpys_own` uses now


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
    """Leave numpy's generator unchanged: draws come from another, which `seed_numpy` starts.

    To exchange generators takes 1 us; to read and set numpy's state takes 100. The second normal
    number of a pair, which numpy keeps, is lost.
    """
    numbers = _numpys()
    if numbers is None:
        yield
        return
    users = numbers.get_bit_generator()
    own = _OF_NUMPY.pop() if _OF_NUMPY else numbers.MT19937(0)
    numbers.set_bit_generator(own)
    try:
        yield
    finally:
        numbers.set_bit_generator(users)
        _OF_NUMPY.append(own)


def seed_numpy(seed: int) -> None:
    """Start numpy's draws from a seed, within `numpys_own`. Does nothing without numpy."""
    numbers = _numpys()
    if numbers is not None:
        numbers.seed(seed % 2**32)


def _numpys() -> Any:
    """numpy's module of random numbers, which numpy loads late; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


class FirstDraws:
    """Around code that may run again: remembers the states of Python's and numpy's generators.

    So too of those that are attributes of the block or its submodules. Recomputation by torch
    repeats torch's own numbers alone.
    """

    def __init__(self, inner: AbstractContextManager[object], block: nn.Module) -> None:
        self._inner = inner
        self.block = block
        self.before: _States = []

    def __enter__(self) -> None:
        self.before = _other_states(self.block)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


class RepeatedDraws:
    """Around code that runs again, which draws the numbers of the first time.

    Afterwards the states are as they were. A backward may run it more than once.
    """

    def __init__(self, first: FirstDraws, inner: AbstractContextManager[object]) -> None:
        self._first = first
        self._inner = inner
        self._now: _States = []

    def __enter__(self) -> None:
        self._now = _other_states(self._first.block)
        _set_states(self._first.before)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            _set_states(self._now)
            self._now = []


def _other_states(block: nn.Module) -> _States:
    """The states of Python's generator, of numpy's where it is loaded, and of the block's."""
    states: _States = [(random.setstate, random.getstate())]
    numbers = _numpys()
    if numbers is not None:
        states.append((numbers.set_state, numbers.get_state()))
    for module in block.modules():
        for value in vars(module).values():
            if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                states.append((value.setstate, value.getstate()))
            elif isinstance(value, torch.Generator):
                states.append((value.set_state, value.get_state()))
            elif numbers is not None and isinstance(value, numbers.RandomState):
                states.append((value.set_state, value.get_state(legacy=False)))
            elif numbers is not None and isinstance(value, numbers.Generator):
                bits = value.bit_generator
                states.append((functools.partial(setattr, bits, "state"), bits.state))
    return states


def _set_states(states: _States) -> None:
    for set_state, state in states:
        set_state(state)


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
