"""What a processor core takes for the operations of a model: seconds for each number, flop or weight, as training meets them.

Training reads inputs that left the caches and writes memory that was not there before, so each operation runs over a row of
different tensors and keeps its results. What Python takes to start it is measured with almost no numbers and taken off: it
is counted by itself (`plait.cli.probe_engine`). All seconds are the processor's, which other processes do not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.products import Products

Calls = Sequence[tuple[Tensor, ...]]
Rows = list[tuple[tuple[float, ...], float]]
"""Sizes, and the seconds that they took."""
COPIES, REPEATS, FEWEST_REPEATS, SPREAD = 6, 5, 3, 1.02
"""Of different tensors in a row; how often: fewer are enough where all came within so much."""
TOKENS, WIDTH = 1024, 512
LARGE_BYTES = 30 << 20
HEADS, LENGTH = 4, 128
HEAD_DIMS = (16, 64)
SMALL_PRODUCTS = ((256, 64, 64), (64, 128, 128))
PRODUCTS = ((256, 128, 128), (32, 512, 512), (512, 192, 512), (2048, 128, 512), (2048, 512, 128), (1024, 384, 384))
"""(rows, inputs, outputs) of linear layers. `plait.products` has a choice for the large ones."""
CONVOLUTIONS = ((32, 32, 8), (64, 64, 2), (16, 128, 1), (64, 128, 2), (16, 256, 1), (64, 256, 1))
"""(samples, channels, side in pixels) of 3 x 3 convolutions."""


def operation_seconds() -> dict[str, float]:
    """All of `plait.cluster.host.SECONDS`, in this rank."""
    convolutions = convolution_seconds()  # first: their gradients are new memory each time, as in training
    torch.empty(LARGE_BYTES, dtype=torch.uint8)  # freed at once: from then on the C library keeps what is freed
    return {**elementwise_seconds(), **attention_seconds(), **product_seconds(), **convolutions, **update_seconds()}


def elementwise_seconds() -> dict[str, float]:
    """Forward and backward of each kind of operation, for each number that it writes."""
    from plait.models.llama import rotate
    from plait.models.losses import cross_entropy

    def rotary(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 32)).transpose(0, 1)
        angles = torch.ones(len(x), 16)
        return rotate(heads, angles, angles)

    def lookup(table: Tensor) -> Tensor:
        return F.embedding(torch.arange(len(table)) % 256, table)

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda x: x + x,
        "norm": lambda x: F.layer_norm(x, (x.shape[-1],), torch.ones(x.shape[-1]), torch.zeros(x.shape[-1])),
        "rms": lambda x: F.rms_norm(x, (x.shape[-1],), torch.ones(x.shape[-1])),
        "group": lambda x: F.relu(F.group_norm(x.view(len(x), -1, 4, 4), 2)),
        "activation": lambda x: F.gelu(x, approximate="tanh"),
        "gate": lambda x: F.silu(x) * x,
        "relu": F.relu,
        "rotary": rotary,
        "permute": lambda x: x.index_select(0, torch.arange(len(x)).flip(0)) * torch.ones(len(x), 1),
        "lookup": lookup,
        "loss": lambda x: cross_entropy(x, torch.zeros(len(x), dtype=torch.long))[0],
    }
    found: dict[str, float] = {}
    for name, function in kinds.items():
        forward, backward = _both_ways(function, (TOKENS, WIDTH))
        found[f"{name}_forward"], found[f"{name}_backward"] = forward / (TOKENS * WIDTH), backward / (TOKENS * WIDTH)
    return found


def attention_seconds() -> dict[str, float]:
    """Causal attention, for each flop (of the whole square) and for each score, which takes an exponential."""

    def core(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    found, scores = {}, 8 * HEADS * LENGTH**2
    narrow, wide = (_both_ways(core, (8, HEADS, LENGTH, width), (1, HEADS, 1, width)) for width in HEAD_DIMS)
    for way, one, other in zip(("forward", "backward"), narrow, wide, strict=True):
        flop = max(other - one, 0.0) / (4.0 * scores * (HEAD_DIMS[1] - HEAD_DIMS[0]))
        found[f"attention_{way}"] = flop
        found[f"score_{way}"] = max(one / scores - 4.0 * HEAD_DIMS[0] * flop, 0.0)
    return found


def product_seconds() -> dict[str, float]:
    """Matrix products of a linear layer, its forward and the two of its backward: for each flop, and for each number of the
    three matrices. `product` by rule, with what it takes to begin, and `plain` as torch makes them."""
    start, *product = _fit([((1.0, *sizes), spent) for sizes, spent in _product_rows(PRODUCTS, Products())])
    plain = _fit(_product_rows(SMALL_PRODUCTS + PRODUCTS, Products("torch")))
    names = ("product_start", "product_flop", "product_number", "plain_flop", "plain_number")
    return dict(zip(names, (start, *product, *plain), strict=True))


def product_rate(size: int = 512) -> float:
    """Flops a second of a product of square matrices, by rule: what a step is a share of."""
    calls = [(torch.randn(size, size), torch.randn(size, size))] * COPIES
    return 2.0 * size**3 / _each(lambda x, w: Products().linear(x, w, None), calls)


def _product_rows(shapes: Sequence[tuple[int, int, int]], made: Products) -> Rows:
    """((flops, numbers), seconds) of each product."""
    rows: Rows = []
    for m, k, n in shapes:
        x, w, grad = ([torch.randn(shape) for _ in range(COPIES)] for shape in ((m, k), (n, k), (m, n)))
        forward = _each(lambda x, w: made.linear(x, w, None), list(zip(x, w, strict=True)))
        input_grad = _each(made.product, list(zip(grad, w, strict=True)))
        weight_grad = _each(lambda grad, x: made.weight_grad(grad.t(), x), list(zip(grad, x, strict=True)))
        sizes = (2.0 * m * n * k, float(m * n + n * k + m * k))
        rows += [(sizes, seconds) for seconds in (forward, input_grad, weight_grad)]
    return rows


def convolution_seconds() -> dict[str, float]:
    """Convolutions, for each flop and for each weight: small images are dominated by the weights."""
    found: dict[str, float] = {}
    forward: Rows = []
    backward: Rows = []
    for samples, channels, side in CONVOLUTIONS:
        shapes = (samples, channels, side, side), (channels, channels, 3, 3)
        calls = [tuple(torch.randn(shape, requires_grad=True) for shape in shapes) for _ in range(COPIES)]
        ahead, back = _passes(lambda x, kernel: F.conv2d(x, kernel, padding=1), calls, torch.ones(shapes[0]))
        sizes = (2.0 * samples * side**2 * channels**2 * 9, 9.0 * channels**2)
        forward.append((sizes, ahead))
        backward.append((sizes, back))
    for way, rows in (("forward", forward), ("backward", backward)):
        found[f"convolution_flop_{way}"], found[f"convolution_weight_{way}"] = _fit(rows)
    return found


def update_seconds() -> dict[str, float]:
    """A step of the optimizer with the norm of the gradient, for each parameter."""
    weight = torch.randn(1 << 20, requires_grad=True)
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> Tensor:
        optimizer.step()
        assert weight.grad is not None
        return weight.grad.dot(weight.grad)

    return {"update": _each(update, [()] * COPIES) / weight.numel(), "fresh": fresh_seconds()}


def fresh_seconds() -> float:
    """Memory that the process did not have before, for each byte: the system zeroes it page by page."""
    times = []
    for _ in range(REPEATS):
        memory = torch.empty(2 * LARGE_BYTES, dtype=torch.uint8)
        began = time.process_time()
        memory.zero_()
        middle = time.process_time()
        memory.zero_()
        times.append((middle - began) - (time.process_time() - middle))
    return max(median(times), 0.0) / (2 * LARGE_BYTES)


def _both_ways(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], least: tuple[int, ...] | None = None
) -> tuple[float, float]:
    """Seconds forward and backward of tensors of a shape, less those of the `least` (one row)."""
    times = []
    for size in (shape, least or (1, *shape[1:])):
        calls = [(torch.randn(size, requires_grad=True),) for _ in range(COPIES)]
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
    return median(ahead) / len(calls), median(back) / len(calls)


def _each(function: Callable[..., Tensor], calls: Calls) -> float:
    """The median seconds of a call, all in a row, results kept."""
    times: list[float] = []
    while not _settled(times):
        start = time.process_time()
        kept = [function(*given) for given in calls]
        times.append(time.process_time() - start)
        del kept
    return median(times) / len(calls)


def _settled(times: list[float]) -> bool:
    return len(times) >= (FEWEST_REPEATS if times and max(times) <= SPREAD * min(times) else REPEATS)


def _fit(rows: Rows) -> list[float]:
    """The factors, none negative, of `seconds = sum of factor x size`, least squares of the relative errors."""
    parts = torch.tensor([[size / seconds for size in sizes] for sizes, seconds in rows], dtype=torch.float64)
    scale = parts.norm(dim=0)
    kept = list(range(parts.shape[1]))
    while True:
        found = torch.linalg.lstsq((parts / scale)[:, kept], torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    factors = [0.0] * parts.shape[1]
    for index, factor in zip(kept, (found / scale[kept]).tolist(), strict=True):
        factors[index] = factor
    return factors
