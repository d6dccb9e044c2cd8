"""Tensors that lie in the memory of a trained parameter, and follow it on one device alone.

An engine gives each parameter memory of its own, by ranks and precision. What was a view of the
old memory would then keep the initial numbers, without a word.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.torch_internals import has_storage, storage_of


@dataclass(frozen=True)
class TrainedMemory:
    """A trained parameter [...], and the first byte of its memory and the one behind the last."""

    name: str
    tensor: Tensor
    start: int
    end: int


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse parameters and buffers in the memory of a trained parameter; warn of attributes.

    Raises:
        ModelError: two names have numbers in common, and are two tensors.
    """
    params: dict[str, Tensor] = {
        name: one for name, one in model.named_parameters() if _lies_somewhere(one)
    }
    trained = defaultdict[int, list[TrainedMemory]](list)
    for name, param in params.items():
        if param.requires_grad:
            trained[storage_of(param)].append(TrainedMemory(name, param, *_extent(param)))
    ids = {id(param) for param in params.values()}
    seen = list(params.items())
    for first, second in _pairs(seen, trained):
        raise ModelError(
            f"the parameters '{first}' and '{second}' of {type(model).__name__} are two tensors in "
            "the same memory, so that one device would train both as one; a plan gives each its "
            f"own: assign one parameter to both names, or use '{second}' in both places (a "
            "transposed weight is F.linear(x, weight.t()))"
        )
    buffers = [(name, one) for name, one in model.named_buffers() if _lies_somewhere(one)]
    for first, second in _pairs([pair for pair in buffers if id(pair[1]) not in ids], trained):
        raise ModelError(
            f"the buffer '{first}' of {type(model).__name__} lies in the memory of the parameter "
            f"'{second}', and follows its training on one device alone; read the parameter in the "
            "forward, or register a clone() if the buffer is to keep the initial numbers"
        )
    held = [(name, one) for name, one in _attributes(model) if id(one) not in ids]
    for first, second in _pairs(held, trained):
        if f"{first}_orig" != second:  # of spectral_norm, which sets it in each forward
            warnings.warn(
                f"the attribute '{first}' of {type(model).__name__} is a view of the parameter "
                f"'{second}', and follows its training on one device alone: here it keeps the "
                "initial numbers; where the forward reads it, take the view of the parameter there",
                stacklevel=3,
            )


def _lies_somewhere(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and has_storage(tensor) and tensor.layout is torch.strided
    return is_there and tensor.numel() > 0


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in attributes of modules, and in lists, tuples and dicts there."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for leaf in _leaves(value):
                if _lies_somewhere(leaf):
                    yield f"{prefix}.{name}" if prefix else name, leaf


def _leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (one for one in value.values() if isinstance(one, Tensor))
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, Tensor))


def _pairs(
    named: list[tuple[str, Tensor]], trained: dict[int, list[TrainedMemory]]
) -> Iterator[tuple[str, str]]:
    """The name of a tensor and that of a trained parameter, which have numbers in common."""
    for name, tensor in named:
        start, end = _extent(tensor)
        for place in trained.get(storage_of(tensor), ()):
            if place.tensor is tensor or start >= place.end or place.start >= end:
                continue
            if start == place.start or _overlap(tensor, place.tensor):
                yield name, place.name


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [...] have a number in common, whose memory is mixed."""
    if one.dtype != other.dtype:
        return True
    start = min(one.storage_offset(), other.storage_offset())
    end = max(_extent(one)[1], _extent(other)[1]) // one.element_size()
    marks = torch.zeros(end - start, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - start).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor [...] in its memory, and the byte behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()
