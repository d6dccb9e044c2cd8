"""Functions that go along a sequence, found in the code of a model: scans, causal convolutions.

A scan takes a first state and can return the last. Its arguments say so: `initial_state` (or
`initial_states`), and `output_final_state` (or `return_final_states`). A causal convolution has
the interface of the package causal_conv1d. Libraries of models, and the packages of fast kernels,
give all of them these arguments. So no layer has to be known.

Code looks such a function up by its name, in its Python module. A `Carrier` stands there in its
place. It calls the function, or in the context of `handing` what hands the state on.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.parallel.context.group import ContextGroup
from plait.values import PyTree

FIRST = ("initial_state", "initial_states")
LAST = ("output_final_state", "return_final_states")
CONVOLUTION = "causal_conv1d"
OF_ONE_TOKEN = "conv_state"  # an argument of the convolution that generates
SEQUENCE = 1  # the dim of a scan's arguments [batch, sequence, ...]
Dims = dict[str, int]


class Carrier:
    """A function along a sequence, and the names of its arguments."""

    def __init__(self, function: Callable[..., PyTree], first: str, last: str) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.first = first
        self.last = last
        self._signature = inspect.signature(function)

    @property
    def is_convolution(self) -> bool:
        """Whether it looks back by the width of a kernel, and carries no state."""
        return not self.first

    def bound(self, args: PyTree, kwargs: PyTree) -> inspect.BoundArguments:
        """The arguments of a call by their names."""
        return self._signature.bind(*args, **kwargs)

    def sequences(self, bound: inspect.BoundArguments, group: ContextGroup) -> Dims:
        """The dim of the sequence of each argument that is a rank's part.

        Empty where they are none, or where a call wants more than its result.
        """
        arguments = bound.arguments
        wants = (arguments.get(self.first), arguments.get(self.last))
        tensors = {name: one for name, one in arguments.items() if isinstance(one, Tensor)}
        unknown = tree_leaves([one for name, one in arguments.items() if name not in tensors])
        if any(want is not None and want is not False for want in wants):
            return {}
        if any(isinstance(leaf, Tensor) for leaf in unknown):  # such as the number of a document
            return {}
        dims = {
            name: dim
            for name, one in tensors.items()
            for dim, size in enumerate(one.shape)
            if size == group.length
        }
        if self.is_convolution:
            first = next(iter(tensors), "")
            fits = dims == {first: tensors[first].dim() - 1} if tensors else False
        else:
            fits = set(dims.values()) == {SEQUENCE}
        return dims if fits else {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The function's result, or that of what hands the state on."""
        hand_on = _current.hand_on
        if hand_on is None:
            return self.function(*args, **kwargs)
        return hand_on(self, args, kwargs)


HandOn = Callable[[Carrier, PyTree, PyTree], PyTree] | None


class _Current(threading.local):
    """The answer to calls of carriers in this thread; None outside of `handing`."""

    hand_on: HandOn = None

    @contextmanager
    def at(self, hand_on: HandOn) -> Iterator[None]:
        """Have another answer for a while."""
        before, self.hand_on = self.hand_on, hand_on
        try:
            yield
        finally:
            self.hand_on = before


_current = _Current()


def handing(hand_on: HandOn) -> AbstractContextManager[None]:
    """Let `hand_on` answer the calls of carriers in this thread; None: their functions do."""
    return _current.at(hand_on)


def adopt(modules: Iterable[nn.Module]) -> None:
    """Put carriers in the place of the functions that the code of these modules may call."""
    names = {type(module).__module__ for module in modules}
    for name in names:
        if name.partition(".")[0] == "torch" or name not in sys.modules:
            continue
        space = vars(sys.modules[name])
        for key, value in list(space.items()):
            if isinstance(value, types.FunctionType) and (carrier := carrier_of(value)):
                space[key] = carrier


def carrier_of(function: Callable[..., PyTree]) -> Carrier | None:
    """The carrier of a function along a sequence; None for any other."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    first = next((name for name in FIRST if name in known), "")
    last = next((name for name in LAST if name in known), "")
    if first and last:
        convolves = any("conv" in name for name in known)
        return None if convolves else Carrier(function, first, last)
    name = getattr(function, "__name__", "")
    if name.startswith(CONVOLUTION) and "weight" in known and OF_ONE_TOKEN not in known:
        return Carrier(function, "", "")
    return None
