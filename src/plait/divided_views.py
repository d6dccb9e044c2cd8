"""Views to the sizes of the whole, on a rank that has a part of what is viewed.

Code that takes its sizes from its input, as `B, T, C = x.shape`, views a part as if it were the
whole. The sizes hold as many times too many numbers as there are ranks, so such a view fails. The
size that is cut is divided here. A view that fits is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.forwards import run_under
from plait.values import PyTree

VIEW = "view"
DROPOUT = "dropout"
_WORD = re.compile(rf"({VIEW}|{DROPOUT})/[1-9]\d*:\d+")
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)


def word(num_sizes: int, position: int, kind: str = VIEW) -> str:
    """The word of a role for tensors of so many dims, of which the one at `position` is divided.

    `kind` says what has these dims: the result of a view, or what dropout gets.

    >>> word(4, 2)
    'view/4:2'
    """
    return f"{kind}/{num_sizes}:{position}"


def is_word(text: str) -> bool:
    """Whether a part of a role is a word of views or of dropout, and no name."""
    return text.startswith((f"{VIEW}/", f"{DROPOUT}/"))


def positions_of(role: str, kind: str = VIEW) -> dict[int, int]:
    """The dim that is divided, by the number of dims, as the words of a kind say in a role.

    >>> positions_of("share num_heads view/4:2 view/3:2 dropout/4:1")
    {4: 2, 3: 2}
    """
    words = (one.partition("/") for one in role.split()[1:])
    pairs = (rest.partition(":") for found, _, rest in words if found == kind)
    return {int(num_sizes): int(position) for num_sizes, _, position in pairs}


def misspelt(role: str) -> str:
    """The first word of a role that begins as one of views or dropout, and is none; else empty.

    >>> misspelt("share view/4:2 view/3")
    'view/3'
    """
    words = (one for one in role.split()[1:] if is_word(one))
    return next((one for one in words if not _WORD.fullmatch(one)), "")


class DividedViews(TorchFunctionMode):
    """The views of a forward, for a part of the whole."""

    def __init__(self, positions: Mapping[int, int], size: int) -> None:
        """Divide by `size` ranks the size at `positions[number of sizes]`."""
        super().__init__()
        self._positions = positions
        self._size = size

    def __torch_function__(  # as torch calls it
        self, func: Callable[..., Any], types: Any, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        if func in _VIEWS:
            args, kwargs = self._divided(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _divided(self, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
        sizes = too_large(args, kwargs, self._size)
        position = self._positions.get(len(sizes))
        if position is None:
            return args, kwargs
        local = list(sizes)
        local[position] //= self._size
        return (args[0], local), {}


class LastView(TorchFunctionMode):
    """The sizes of the last view of a forward, where they are too large for one of `size` ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.sizes: tuple[int, ...] = ()
        self._size = size

    def __torch_function__(  # as torch calls it
        self, func: Callable[..., Any], types: Any, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        if func in _VIEWS:
            self.sizes = too_large(args, kwargs or {}, self._size)
        return func(*args, **(kwargs or {}))


def too_large(args: PyTree, kwargs: PyTree, size: int) -> tuple[int, ...]:
    """The sizes of a view that hold `size` times the numbers of its tensor; else none."""
    named = kwargs.get("shape", kwargs.get("size"))
    given = args[1:] if named is None else (named,)
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    counts = all(isinstance(one, (int, torch.SymInt)) and one >= 0 for one in sizes)
    if not args or not sizes or not counts or _numbers(sizes) != size * _numbers(args[0].shape):
        return ()
    return tuple(sizes)


def _numbers(sizes: Sequence[int]) -> int:
    """The numbers of a tensor of these sizes; of one without samples, those of one sample."""
    return math.prod([one for one in sizes if one != 0])


def divide_views(module: nn.Module, positions: Mapping[int, int], size: int) -> None:
    """Let the forward of a module run with its views divided by `size` ranks."""
    run_under(module, partial(DividedViews, positions, size))
