"""AdamW of many tensors by one kernel of Triton, in one pass over memory.

Tables have the addresses of all tensors, so that gradients are read where backward left them. Only
this module imports Triton, which a build of torch for GPUs brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.engine.adamw import AdamWTensors, Rule

BLOCK = 2048
"""Elements that one program updates."""
ALIGNMENT = 16
"""Bytes of one load, where every tensor begins at a multiple of them, and its size is one."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonKernel:
    """Updates kept tensors of one GPU. Where they lie is told the device once."""

    def __init__(self, kept: Sequence[AdamWTensors]) -> None:
        self._device = kept[0].value.device
        self._kept = kept
        self._groups: dict[tuple[bool, torch.dtype], list[int]] = {}
        for index, one in enumerate(kept):
            self._groups.setdefault((_is_aligned(one), one.copy.dtype), []).append(index)
        self._tables = {key: self._table(indices) for key, indices in self._groups.items()}
        self._sent: dict[tuple[bool, torch.dtype], tuple[list[int], Tensor]] = {}

    def __call__(self, grads: Sequence[Tensor], rule: Rule) -> None:
        """One step on gradients [...] of one precision, one for each kept tensor."""
        places = [grad.data_ptr() for grad in grads]
        numbers = _numbers(rule, self._device)
        for key, indices in self._groups.items():
            was_aligned, copy = key
            own = [places[index] for index in indices]
            addresses, blocks = self._tables[key]
            _adamw[(blocks.shape[0],)](
                addresses,
                self._told(key, own),
                blocks,
                numbers,
                GRAD=TYPES[grads[0].dtype],
                COPY=TYPES[copy],
                ALIGNED=was_aligned and not any(place % ALIGNMENT for place in own),
                BLOCK=BLOCK,
                num_warps=8,
            )

    def _told(self, key: tuple[bool, torch.dtype], places: list[int]) -> Tensor:
        """Where gradients begin, [n] on the device; graphs leave them where they were."""
        if key not in self._sent or self._sent[key][0] != places:
            told = _on(self._device, torch.tensor(places, dtype=torch.int64))
            self._sent[key] = places, told
        return self._sent[key][1]

    def _table(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where arrays and counts begin, [n, 5]; and tensor, first element and size of each
        program, [programs, 3].
        """
        kept = [self._kept[index] for index in indices]
        rows = [[*(array.data_ptr() for array in one.arrays), one.step.data_ptr()] for one in kept]
        programs = [
            (row, start, one.numel)
            for row, one in enumerate(kept)
            for start in range(0, one.numel, BLOCK)
        ]
        addresses = torch.tensor(rows, dtype=torch.int64).to(self._device)
        return addresses, torch.tensor(programs, dtype=torch.int64).to(self._device)


def _is_aligned(one: AdamWTensors) -> bool:
    sizes = (one.numel, *(array.data_ptr() for array in one.arrays))
    return not any(size % ALIGNMENT for size in sizes)


def _numbers(rule: Rule, device: torch.device) -> Tensor:
    """The numbers of a rule, whether nothing is to change, and the logarithms of its betas.

    [9], in float64. What the device has decided is copied there.
    """
    logs = [math.log(beta) if beta else -math.inf for beta in rule.betas]
    numbers = [rule.rate, *rule.betas, rule.epsilon, rule.decay, rule.factor, 0.0, *logs]
    found = _on(device, torch.tensor(numbers, dtype=torch.float64))
    if rule.on_device is not None:
        torch.stack((rule.on_device.factor, rule.on_device.blocked), out=found[5:7])
    return found


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _adamw(  # type: ignore[no-untyped-def] # noqa: PLR0917 - what Triton calls has no keywords
    addresses,
    grads,
    blocks,
    numbers,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = blocks + 3 * tl.program_id(0)
    index = tl.load(program)
    row = addresses + 5 * index
    value = tl.load(row).to(tl.pointer_type(tl.float32))
    mean = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    square = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    grad = tl.load(grads + index).to(tl.pointer_type(GRAD))
    copy = tl.load(row + 3).to(tl.pointer_type(COPY))
    blocked = tl.load(numbers + 6)
    size = tl.where(blocked > 0, 0, tl.load(program + 2))
    if ALIGNED:
        value = tl.multiple_of(value, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
        grad = tl.multiple_of(grad, 16)
        copy = tl.multiple_of(copy, 16)
        size = tl.multiple_of(size, 16)
    first = tl.multiple_of(tl.load(program + 1), BLOCK)
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < size

    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
    rate = tl.load(numbers)
    beta1 = tl.load(numbers + 1)
    beta2 = tl.load(numbers + 2)
    epsilon = tl.load(numbers + 3).to(tl.float32)
    decay = tl.load(numbers + 4)
    factor = tl.load(numbers + 5).to(tl.float32)
    correction1 = 1.0 - tl.exp(step * tl.load(numbers + 7))
    correction2 = 1.0 - tl.exp(step * tl.load(numbers + 8))
    rate1 = (rate / correction1).to(tl.float32)
    root = tl.sqrt(correction2).to(tl.float32)
    kept = (1.0 - rate * decay).to(tl.float32)
    new1 = (1.0 - beta1).to(tl.float32)
    old2 = beta2.to(tl.float32)
    new2 = (1.0 - beta2).to(tl.float32)

    g = tl.load(grad + offsets, mask=inside).to(tl.float32) * factor
    m = tl.load(mean + offsets, mask=inside)
    v = tl.load(square + offsets, mask=inside)
    w = tl.load(value + offsets, mask=inside)
    m += new1 * (g - m)
    v = old2 * v + new2 * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + epsilon
    w = w * kept - tl.div_rn(rate1 * m, denominator)
    tl.store(mean + offsets, m, mask=inside)
    tl.store(square + offsets, v, mask=inside)
    tl.store(value + offsets, w, mask=inside)
    tl.store(copy + offsets, w.to(COPY), mask=inside)
