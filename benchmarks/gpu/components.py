"""Single operations beside the planner's seconds for them: products, attention, experts, the rest.

The planner aims at 6 % for products and at 10 % for attention. A product is measured after a pause,
when clocks are high, and after a third of a second of it, as in the midst of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import clear, loaded_seconds, operation_seconds
from benchmarks.gpu.predicted import card_machine, preset
from benchmarks.gpu.steps import adamw, backend, place
from plait import models
from plait.predict.cost.api import described
from plait.predict.cost.model.operations import Attention, Block, Elementwise, Saved
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.kernels import (
    Setting,
    attention_seconds,
    block_seconds,
    gemm_seconds,
)

PRODUCTS = (
    *((16384, 768, 768), (16384, 3072, 768), (8192, 2048, 2048), (8192, 8192, 2048)),
    *((4096, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 128256, 4096)),
    *((14336, 4096, 4096), (768, 3072, 16384)),
)
"""Rows, outputs and depth; the last two are as weight gradients are."""
LENGTHS = (1024, 4096, 8192)
ATTENTION_TOKENS = 16384
HEADS = ((32, 32), (32, 8))
KERNELS = (
    ("as it comes", None, "portable"),
    ("flash", SDPBackend.FLASH_ATTENTION, "portable"),
    ("cuDNN", SDPBackend.CUDNN_ATTENTION, "tuned"),
)
WIDTH, INNER, EXPERTS, CHOSEN, TOKENS = 2048, 4096, 8, 2, 8192


def compiled_norm(device: str) -> Callable[..., Any]:
    return torch.compile(_norm, backend=backend(device))


def _norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and RMS norm, [tokens, width] each."""
    total = x + y
    return total, F.rms_norm(total, (total.shape[-1],), weight)


def prepare(device: str, number: str) -> None:
    """Compile the norm."""
    total, normal = compiled_norm(device)(*_norm_inputs(device))
    (total.sum() + normal.sum()).backward()
    clear(device)


def measure(turn: Turn, number: str) -> None:
    """Every table; one that fails leaves the others."""
    for title, part in (
        ("products", products),
        ("attention", attention),
        ("experts", experts),
        ("norm, copies, AdamW", others),
    ):
        try:
            part(turn)
        except Exception as error:  # the next table may go well
            turn.record.failed(title, error)
        clear(turn.device)


def products(turn: Turn) -> None:
    """Matrix products in bf16."""
    machine = card_machine()
    turn.record.head(
        f"matrix products in bf16, predicted for {preset()}",
        ("m x n x k", "us alone", "predicted / it", "us in a row", "predicted / it", "TFLOP/s"),
    )
    for sizes in PRODUCTS:
        m, n, k = sizes if turn.device == "cuda" else tuple(max(8, one // 64) for one in sizes)
        x = torch.randn(m, k, device=place(turn.device), dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=place(turn.device), dtype=torch.bfloat16)
        short, steady = loaded_seconds(partial(F.linear, x, weight), turn.device)
        alone, inside = (
            gemm_seconds(Setting(machine, Sharding(), "bf16", True, in_step), m, n, k)
            for in_step in (False, True)
        )
        turn.record.row(
            f"{m} x {n} x {k}",
            f"{short * 1e6:.1f}",
            f"{alone / short:.3f}",
            f"{steady * 1e6:.1f}",
            f"{inside / steady:.3f}",
            f"{2 * m * n * k / steady / 1e12:.0f}",
        )
        turn.record.keep(
            operation="product",
            sizes=(m, n, k),
            alone=short,
            in_a_row=steady,
            predicted_alone=alone,
            predicted_in_step=inside,
        )


def attention(turn: Turn) -> None:
    """Causal attention, forward and backward."""
    turn.record.head(
        f"causal attention in bf16, {ATTENTION_TOKENS} tokens, heads of 128, for {preset()}",
        (
            *("sequence", "heads", "kernel", "forward us", "predicted / it"),
            *("backward us", "predicted / it", "TFLOP/s of both"),
        ),
    )
    for length in LENGTHS:
        for heads, kv_heads in HEADS:
            for name, kernel, kind in KERNELS:
                try:
                    _attention(turn, (length, heads, kv_heads), name, kernel, kind)
                except Exception as error:  # a card may lack a kernel
                    turn.record.failed(f"attention {length} {heads}/{kv_heads} {name}", error)


def _attention(
    turn: Turn, sizes: tuple[int, int, int], name: str, kernel: SDPBackend | None, kind: str
) -> None:
    length, heads, kv_heads = sizes
    samples, dim = ATTENTION_TOKENS // length, 128
    if turn.device == "cpu":
        length, samples, dim = length // 128, 2, 16
    machine = card_machine()
    shape = {"device": place(turn.device), "dtype": torch.bfloat16}
    # As the models here make them: heads are turned to the front, and memory keeps tokens first.
    q, k, v = (
        torch.randn(samples, length, count, dim, **shape).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    weight = torch.randn(samples, length, heads, dim, **shape).transpose(1, 2)
    chosen: AbstractContextManager[Any] = nullcontext()
    if kernel is not None and turn.device == "cuda":
        chosen = sdpa_kernel(kernel)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), weight)

    if kernel is None:
        name = f"as it comes: {_choice(q, k, v)}"
    with chosen:
        first = operation_seconds(forward, turn.device)
        total = operation_seconds(both, turn.device)
    op = Attention("attention", heads, kv_heads, dim, dim, kernel=kind)
    setting = Setting(machine, Sharding(seq_len=length, samples=samples), "bf16", True)
    there, back = attention_seconds(op, setting)
    second = max(1e-9, total - first)
    flops = 3.5 * op.flops(length) / 2 * samples * length
    turn.record.row(
        length,
        f"{heads}/{kv_heads}",
        name,
        f"{first * 1e6:.0f}",
        f"{there / first:.3f}",
        f"{second * 1e6:.0f}",
        f"{back / second:.3f}",
        f"{flops / total / 1e12:.0f}",
    )
    turn.record.keep(
        operation="attention",
        sizes=(samples, length, heads, kv_heads, dim),
        kernel=name,
        forward=first,
        backward=second,
        predicted_forward=there,
        predicted_backward=back,
    )


def _choice(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The kernel that torch takes by itself."""
    grouped = q.shape[1] != k.shape[1]
    try:
        number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
        return str(SDPBackend(number)).rpartition(".")[2].lower()
    except Exception as error:  # an operation of torch's inside
        return type(error).__name__


def experts(turn: Turn) -> None:
    """A layer of experts, and the dense one of equal flops."""
    width, inner, tokens = WIDTH, INNER, TOKENS
    if turn.device == "cpu":
        width, inner, tokens = 64, 128, 64
    turn.record.head(
        f"layers of {width} x {inner}, {tokens} tokens, forward and backward, for {preset()}",
        ("layer", "forward us", "predicted / it", "both us", "predicted / it", "both / dense"),
    )
    keys = {
        "num_hidden_layers": 1,
        "hidden_size": width,
        "num_attention_heads": 16,
        "vocab_size": 64,
        "max_position_embeddings": tokens,
    }
    routed = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    dense_seconds = 0.0
    for name, own in (
        ("dense", {"intermediate_size": CHOSEN * inner}),
        (f"{EXPERTS} experts, top {CHOSEN}", {"intermediate_size": inner, **routed}),
    ):
        layer = _mlp(turn.device, {**keys, **own})
        there, both = _mlp_seconds({**keys, **own}, tokens)
        shape = (1, tokens, width)
        x = torch.randn(shape, device=place(turn.device), dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        params = [param for param in layer.parameters() if param.requires_grad]
        forward = partial(layer, x)
        first = operation_seconds(forward, turn.device)
        total = operation_seconds(
            lambda forward=forward, inputs=(x, *params), grad=grad: torch.autograd.grad(
                forward(), inputs, grad
            ),
            turn.device,
        )
        dense_seconds = dense_seconds or total
        turn.record.row(
            name,
            f"{first * 1e6:.0f}",
            f"{there / first:.3f}",
            f"{total * 1e6:.0f}",
            f"{both / total:.3f}",
            f"{total / dense_seconds:.3f}",
        )
        turn.record.keep(
            operation=name,
            forward=first,
            both=total,
            predicted_forward=there,
            predicted_both=both,
        )


def _mlp(device: str, keys: dict[str, Any]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(place(device)):
            model: Any = models.make("llama", **keys)
    finally:
        torch.set_default_dtype(before)
    return model.blocks[0].mlp


def _mlp_seconds(keys: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Forward, and forward with backward, of the part of a block after its second norm."""
    tables = {
        "model": {"name": "llama", **keys},
        "data": {"seq_len": tokens},
        "train": {"global_batch": 1},
    }
    block = described(tables).runs[1][0]
    names = [op.name for op in block.operations]
    inside = block.operations[names.index("norm2") + 1 :]
    return _seconds(tuple(op for op in inside if op.name != "residual"), tokens)


def _seconds(operations: tuple[Any, ...], tokens: int) -> tuple[float, float]:
    block = Block("layer", operations, Saved(), 1)
    setting = Setting(card_machine(), Sharding(seq_len=tokens, samples=1.0), "bf16", True)
    found = block_seconds(block, setting)
    return found.forward, found.forward + found.input_grad + found.weight_grad


def _norm_inputs(device: str) -> list[Tensor]:
    tokens, width = (65536, 4096) if device == "cuda" else (32, 64)
    shape = {"device": place(device), "dtype": torch.bfloat16, "requires_grad": True}
    return [
        torch.randn(tokens, width, **shape),
        torch.randn(tokens, width, **shape),
        torch.ones(width, **shape),
    ]


def others(turn: Turn) -> None:
    """Norm with residual, a copy, and an update."""
    machine = card_machine()
    turn.record.head(
        f"bound by memory, for {preset()}", ("operation", "us", "GB/s", "predicted / it")
    )

    def row(name: str, seconds: float, moved: float, predicted: float) -> None:
        turn.record.row(
            name,
            f"{seconds * 1e6:.1f}",
            f"{moved / seconds / 1e9:.0f}",
            f"{predicted / seconds:.3f}",
        )
        turn.record.keep(operation=name, seconds=seconds, bytes=moved, predicted=predicted)

    device = turn.device
    inputs = _norm_inputs(device)
    tokens, width = inputs[0].shape
    norm = compiled_norm(device)
    grads = [torch.randn_like(inputs[0]), torch.randn_like(inputs[0])]
    op = Elementwise("norm", 2.0 * width, 2.0 * width)
    there, both = _seconds((op,), tokens)
    forward = operation_seconds(lambda: norm(*inputs), device)
    row("residual and norm, forward", forward, 8.0 * tokens * width, there)
    total = operation_seconds(lambda: torch.autograd.grad(norm(*inputs), inputs, grads), device)
    row("the same with backward", total, 20.0 * tokens * width, both)
    for exponent in (26, 30) if device == "cuda" else (16,):
        source = torch.ones(1 << exponent, dtype=torch.uint8, device=place(device))
        target = torch.empty_like(source)
        seconds = operation_seconds(partial(target.copy_, source), device)
        moved = 2.0 * source.numel()
        row(f"copy of 2^{exponent} bytes", seconds, moved, moved / machine.streaming_rate)
    del source, target
    clear(device)
    numbers = 10**9 if device == "cuda" else 10**5
    master = nn.Parameter(torch.zeros(numbers, device=place(device)))
    master.grad = torch.ones_like(master)
    optimizer = adamw([master])
    optimizer.step()
    seconds = operation_seconds(optimizer.step, device, 5)
    # 12 bytes of state a number: master and moments, as a bf16 plan has them.
    row(f"AdamW of {numbers:,}", seconds, 28.0 * numbers, machine.update_seconds(12.0 * numbers))
