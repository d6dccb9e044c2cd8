"""Seconds of a processor core for the operations of a model: for each number, flop or weight, as in
training.

Training comes back to a tensor when it has left the caches long ago. So each operation runs over a
row of different tensors that are more than the caches hold. It keeps its results. What Python takes
to start it is measured with almost no numbers and taken off: it is counted by itself
(`plait.predict.probe.engine`). All seconds are the processor's, which other processes do not
lengthen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.products import Products

Calls = Sequence[tuple[Tensor, ...]]
Rows = list[tuple[tuple[float, ...], float]]
"""Sizes, and the seconds that they took."""
FEWEST_COPIES = 6
REPEATS = 4
FEWEST_REPEATS = 2
SPREAD = 1.04
"""Different tensors in a row; how often, of which the first does not count. Fewer are enough where
all came within so much.
"""
SOME_CACHE_BYTES = 32 << 20
MOST_BYTES = 64 << 20
"""A row is three quarters of the last cache, which ranks share. A cache of unknown size is taken to
be so large, and the row is no larger.
"""
TOKENS = 1024
WIDTH = 512
UPDATED = 4 << 20
"""Parameters of an update."""
FREED_BYTES = 2 << 20
FREED_TIMES = 9
SAMPLES = 8
HEADS = 4
LENGTH = 128
HEAD_DIMS = (16, 64)
PRODUCTS = (
    (256, 128, 128),
    (32, 512, 512),
    (512, 192, 512),
    (2048, 128, 512),
    (2048, 512, 128),
    (1024, 384, 384),
)
PLAIN_PRODUCTS = ((256, 64, 64), (64, 128, 128), (256, 128, 128), (512, 192, 512))
"""(rows, inputs, outputs) of linear layers. `plait.products` has a choice for the large ones."""
CONVOLUTIONS = ((32, 32, 8), (64, 64, 2), (16, 128, 1), (64, 128, 2), (64, 256, 1))
"""(samples, channels, side in pixels) of 3 x 3 convolutions."""


def elementwise_seconds() -> dict[str, float]:
    """Forward and backward of each kind of operation, for each number that it writes."""
    from plait.models.llama import rotate
    from plait.models.losses import cross_entropy

    def ones(like: Tensor) -> Tensor:
        """A parameter of a norm."""
        return torch.ones(like.shape[-1], requires_grad=True)

    def rotary(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 32)).transpose(0, 1)
        angles = torch.ones(len(x), 16)
        return rotate(heads, angles, angles)

    def lookup(table: Tensor) -> Tensor:
        return F.embedding(torch.arange(len(table)) % 256, table)

    kinds: dict[str, Callable[..., Tensor]] = {
        "add": lambda x: x + x,
        "norm": lambda x: F.layer_norm(x, (x.shape[-1],), ones(x), ones(x)),
        "rms": lambda x: F.rms_norm(x, (x.shape[-1],), ones(x)),
        "group": lambda x: F.relu(F.group_norm(x.view(len(x), -1, 4, 4), 2)),
        "activation": lambda x: F.gelu(x, approximate="tanh"),
        "gate": lambda x, y: F.silu(x) * y,
        "relu": F.relu,
        "rotary": rotary,
        "permute": lambda x: (
            x.index_select(0, torch.arange(len(x)).flip(0)) * torch.ones(len(x), 1)
        ),
        "lookup": lookup,
        "loss": lambda x: cross_entropy(x, torch.zeros(len(x), dtype=torch.long))[0],
    }
    seconds: dict[str, float] = {}
    for name, function in kinds.items():
        forward, backward = _both_ways(function, (TOKENS, WIDTH), inputs=2 if name == "gate" else 1)
        seconds[f"{name}_forward"], seconds[f"{name}_backward"] = (
            forward / (TOKENS * WIDTH),
            backward / (TOKENS * WIDTH),
        )
    rows = [(_tensor((TOKENS, WIDTH)),) for _ in range(_copies(TOKENS * WIDTH))]
    return {**seconds, "bias": _each(lambda grad: grad.sum(0), rows) / (TOKENS * WIDTH)}


def attention_seconds() -> dict[str, float]:
    """Causal attention, for each flop (of the whole square) and for each score, which takes an
    exponential. Its features are not cut into heads, as in the layers beside it.
    """
    seconds = {}
    scores = SAMPLES * HEADS * LENGTH**2
    measured = []
    for width in HEAD_DIMS:

        def core(*qkv: Tensor, width: int = width) -> Tensor:
            q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in qkv)
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )

        measured.append(
            _both_ways(core, (SAMPLES, LENGTH, HEADS * width), (1, 1, HEADS * width), inputs=3)
        )
    for way, one, other in zip(("forward", "backward"), *measured, strict=True):
        flop = max(other - one, 0.0) / (4.0 * scores * (HEAD_DIMS[1] - HEAD_DIMS[0]))
        seconds[f"attention_{way}"] = flop
        seconds[f"score_{way}"] = max(one / scores - 4.0 * HEAD_DIMS[0] * flop, 0.0)
    return seconds


def product_seconds() -> dict[str, float]:
    """Matrix products of a linear layer, its forward and the two of its backward, made by rule. The
    parts are the start, each flop, and each number of the three matrices.
    """
    found = _fit([((1.0, *sizes), spent) for sizes, spent in _product_rows(PRODUCTS, Products())])
    return dict(zip(("product_start", "product_flop", "product_number"), found, strict=True))


def plain_product_seconds() -> dict[str, float]:
    """Products as torch itself makes them."""
    return dict(
        zip(
            ("plain_flop", "plain_number"),
            _fit(_product_rows(PLAIN_PRODUCTS, Products("torch"))),
            strict=True,
        )
    )


def product_rate(size: int = 512) -> float:
    """Flops a second of a product of square matrices, by rule: what a step is a share of."""
    calls = [(torch.randn(size, size), torch.randn(size, size))] * FEWEST_COPIES
    return 2.0 * size**3 / _each(lambda x, w: Products().linear(x, w, None), calls)


def _product_rows(shapes: Sequence[tuple[int, int, int]], made: Products) -> Rows:
    """((flops, numbers), seconds) of each product."""
    rows: Rows = []
    for m, k, n in shapes:
        copies = _copies(m * k + n * k + m * n)
        x, w, grad = ([_tensor(shape) for _ in range(copies)] for shape in ((m, k), (n, k), (m, n)))
        forward = _each(lambda x, w: made.linear(x, w, None), list(zip(x, w, strict=True)))
        input_grad = _each(made.product, list(zip(grad, w, strict=True)))
        weight_grad = _each(
            lambda grad, x: made.weight_grad(grad.t(), x), list(zip(grad, x, strict=True))
        )
        sizes = (2.0 * m * n * k, float(m * n + n * k + m * k))
        rows += [(sizes, seconds) for seconds in (forward, input_grad, weight_grad)]
    return rows


def convolution_seconds() -> dict[str, float]:
    """Convolutions, for each flop and for each weight: small images are dominated by the
    weights.
    """
    seconds: dict[str, float] = {}
    forward: Rows = []
    backward: Rows = []
    for samples, channels, side in CONVOLUTIONS:
        shapes = (samples, channels, side, side), (channels, channels, 3, 3)
        copies = _copies(2 * math.prod(shapes[0]) + math.prod(shapes[1]))
        calls = [tuple(_tensor(shape).requires_grad_() for shape in shapes) for _ in range(copies)]
        ahead, back = _passes(
            lambda x, kernel: F.conv2d(x, kernel, padding=1), calls, torch.ones(shapes[0])
        )
        sizes = (2.0 * samples * side**2 * channels**2 * 9, 9.0 * channels**2)
        forward.append((sizes, ahead))
        backward.append((sizes, back))
    for way, rows in (("forward", forward), ("backward", backward)):
        seconds[f"convolution_flop_{way}"], seconds[f"convolution_weight_{way}"] = _fit(rows)
    return seconds


def update_seconds() -> dict[str, float]:
    """A step of the optimizer with the norm of the gradient, for each parameter."""
    weight = _tensor((UPDATED,)).requires_grad_()
    weight.grad = _tensor((UPDATED,))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> Tensor:
        optimizer.step()
        assert weight.grad is not None
        return weight.grad.dot(weight.grad)

    update()  # makes the optimizer's state
    return {"update": _each(update, [()]) / UPDATED, "fresh": fresh_seconds()}


def fresh_seconds() -> float:
    """Memory that is freed and taken again, for each byte. Where the process does not keep it, the
    system zeroes it page by page.
    """
    times = []
    for _ in range(FREED_TIMES):
        memory = torch.empty(FREED_BYTES, dtype=torch.uint8)
        began = time.process_time()
        memory.zero_()
        middle = time.process_time()
        memory.zero_()
        times.append((middle - began) - (time.process_time() - middle))
        del memory
    return max(median(times[1:]), 0.0) / FREED_BYTES


def _tensor(shape: tuple[int, ...]) -> Tensor:
    """Numbers that make no operation quicker or slower than others. Drawing random ones would take
    longer than using them.
    """
    return torch.full(shape, 0.5)


def _leaves(shape: tuple[int, ...], number: int) -> tuple[Tensor, ...]:
    """Tensors of a shape whose gradients backward makes."""
    return tuple(_tensor(shape).requires_grad_() for _ in range(number))


def _copies(numbers: int) -> int:
    """How many tensors of so many float32 numbers are more than the caches hold."""
    return max(FEWEST_COPIES, math.ceil(_row_bytes() / (4 * numbers)))


@cache
def _row_bytes() -> float:
    sizes = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    last = max(
        (int(size[:-1]) << 10 for size in sizes if size[:-1].isdigit() and size.endswith("K")),
        default=SOME_CACHE_BYTES,
    )
    return min(0.75 * last, MOST_BYTES)


def _both_ways(
    function: Callable[..., Tensor],
    shape: tuple[int, ...],
    least: tuple[int, ...] | None = None,
    *,
    inputs: int = 1,
) -> tuple[float, float]:
    """Seconds forward and backward of `inputs` tensors of a shape, less those of the `least` (one
    row).
    """
    times = []
    copies = _copies((1 + inputs) * math.prod(shape))
    for size in (shape, least or (1, *shape[1:])):
        calls = [_leaves(size, inputs) for _ in range(copies)]
        times.append(_passes(function, calls, torch.ones_like(function(*calls[0]))))
    (forward, backward), (start, start_back) = times
    return max(forward - start, 0.0), max(backward - start_back, 0.0)


def _passes(function: Callable[..., Tensor], calls: Calls, gradient: Tensor) -> tuple[float, float]:
    """The median seconds of a forward and of a backward, all calls in a row."""
    ahead: list[float] = []
    back: list[float] = []
    while not (_settled(ahead) and _settled(back)):
        start = time.process_time()
        outs = [function(*given) for given in calls]
        middle = time.process_time()
        torch.autograd.backward(outs, [gradient] * len(outs))
        back.append(time.process_time() - middle)
        ahead.append(middle - start)
        for leaf in (leaf for given in calls for leaf in given):
            leaf.grad = None
    return median(ahead[1:]) / len(calls), median(back[1:]) / len(calls)


def _each(function: Callable[..., Tensor], calls: Calls) -> float:
    """The median seconds of a call, all in a row, results kept."""
    times: list[float] = []
    while not _settled(times):
        start = time.process_time()
        kept = [function(*given) for given in calls]
        times.append(time.process_time() - start)
        del kept
    return median(times[1:]) / len(calls)


def _settled(times: list[float]) -> bool:
    later = times[1:]
    return len(later) >= (
        FEWEST_REPEATS if later and max(later) <= SPREAD * min(later) else REPEATS - 1
    )


def _fit(rows: Rows) -> list[float]:
    """The factors, none negative, of `seconds = sum of factor x size`, least squares of the
    relative errors.
    """
    parts = torch.tensor(
        [[size / seconds for size in sizes] for sizes, seconds in rows], dtype=torch.float64
    )
    scale = parts.norm(dim=0)
    columns = list(range(parts.shape[1]))
    while True:
        solution = torch.linalg.lstsq(
            (parts / scale)[:, columns], torch.ones(len(rows), 1, dtype=torch.float64)
        ).solution.flatten()
        if solution.min() >= 0:
            break
        del columns[int(solution.argmin())]
    factors = [0.0] * parts.shape[1]
    for index, factor in zip(columns, (solution / scale[columns]).tolist(), strict=True):
        factors[index] = factor
    return factors


OPERATIONS: tuple[Callable[[], dict[str, float]], ...] = (
    product_seconds,
    convolution_seconds,
    elementwise_seconds,
    plain_product_seconds,
    attention_seconds,
    update_seconds,
)
"""All of `plait.cluster.cpu_profile.SECONDS`."""
