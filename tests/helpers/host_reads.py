"""Where the host reads values of tensors while a step runs: on an accelerator it would wait there.

`with HostReads() as reads: engine.step(batch)`; then `reads.places` counts (file, function,
operation). Ranks of one host move bytes on the host itself: reads of such transports are left
out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import plait

SOURCE = Path(plait.__file__).parent
READS: frozenset[Any] = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu),
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
        *(Tensor.__contains__, Tensor.nonzero, torch.nonzero, torch.argwhere),
        *(Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique),
        *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
    }
)
MAKES_SIZES: frozenset[Any] = frozenset({Tensor.repeat_interleave, torch.repeat_interleave})
"""Reads the sum of its repeats unless it is told the size of its output."""
OF_PROCESSORS = ("comm/shm/", "comm/simulated", "comm/backends/")

Place = tuple[str, str, str]


class HostReads(TorchFunctionMode):
    """Counts reads by place while it is entered, in this thread alone."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[Place] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func in READS or (func in MAKES_SIZES and "output_size" not in keywords):
            where = _place()
            if where is not None:
                self.places[(*where, getattr(func, "__name__", str(func)))] += 1
        return func(*args, **keywords)


def _place() -> tuple[str, str] | None:
    """The innermost function of plait on the stack; None for transports of processors.

    A `__torch_function__` of plait calls what another function of plait has asked for.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and frame.f_code.co_name != "__torch_function__":
            name = path.relative_to(SOURCE).as_posix()
            if name.startswith(OF_PROCESSORS):
                return None
            return name, frame.f_code.co_name
        frame = frame.f_back
    return None
