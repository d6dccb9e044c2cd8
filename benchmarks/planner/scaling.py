"""Weak scaling from 8 to 131,072 devices: the best plan at each size, and the size from which each
axis is worth having.

    python -m benchmarks.planner.scaling [--svg FILE]

The batch grows with the devices to the largest in use (64 M tokens) and then stays: beyond it, data
parallelism has nothing left to divide and the other axes must carry the growth.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from benchmarks.machine import announce
from plait.predict.planner.answers import choose
from plait.predict.planner.choose import NothingFits

SIZES = tuple(8 * 4**power for power in range(8))
SEQ_LEN = 8192
LARGEST_BATCH = 8192
MODELS = {
    "dense 8B": {
        **{
            "name": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        **{"intermediate_size": 14336, "vocab_size": 128256},
    },
    "experts 16x, 20B": {
        **{
            "name": "llama",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        **{
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
        },
        **{"moe_intermediate_size": 8192},
    },
}


def curve(model: dict[str, object], device: str) -> list[tuple[int, str, float, float]]:
    """(devices, plan, tokens a second and device, MFU) at each size; sizes where nothing fits are
    left out.
    """
    points = []
    for size in SIZES:
        batch = min(LARGEST_BATCH, size * 2)
        started = time.perf_counter()
        try:
            best = choose(
                {"model": model, "data": {"seq_len": SEQ_LEN}, "train": {"global_batch": batch}},
                f"{device}x{size}",
                top=1,
            )[0]
        except NothingFits as reason:
            print(f"{size:8} {reason}")
            continue
        seconds = time.perf_counter() - started
        data = best.as_dict()
        points.append((size, data["plan"], data["tokens_per_second_per_device"], data["mfu"]))
        print(
            f"{size:8} {data['tokens_per_second_per_device']:9.0f} {data['mfu']:7.1%} "
            f"{seconds:5.1f} s  {data['plan']}"
        )
    return points


WIDTH = 640
HEIGHT = 320
LEFT = 50
BOTTOM = 40
COLOURS = ("#1f77b4", "#d62728")


def draw(curves: dict[str, list[tuple[int, str, float, float]]], path: Path) -> None:
    """MFU over devices (a scale of powers), one line a model, as SVG written by hand."""
    top = max(point[3] for points in curves.values() for point in points) * 1.15

    def place(devices: int, mfu: float) -> tuple[float, float]:
        along = math.log2(devices / SIZES[0]) / math.log2(SIZES[-1] / SIZES[0])
        return LEFT + along * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - mfu / top * (
            HEIGHT - BOTTOM - 20
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">'
    ]
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for size in SIZES:
        x, y = place(size, 0.0)
        out.append(f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{size}</text>')
    for tenth in range(int(top * 10) + 1):
        x, y = place(SIZES[0], tenth / 10)
        out.append(f'<path d="M{x:.0f} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{tenth * 10}%</text>')
    for index, (name, points) in enumerate(curves.items()):
        line = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (place(point[0], point[3]) for point in points)
        )
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[index]}" stroke-width="2"/>'
        )
        out.append(
            f'<text x="{WIDTH - 150}" y="{30 + 16 * index}" fill="{COLOURS[index]}">{name}</text>'
        )
    out.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">devices; predicted MFU of '
        "the best plan</text></svg>"
    )
    path.write_text("\n".join(out) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--device", default="h100")
    arguments = parser.parse_args()
    announce()
    curves = {}
    for name, model in MODELS.items():
        print(
            f"{name} on {arguments.device}: devices, tokens/s a device, MFU, time of the search, "
            "best plan"
        )
        curves[name] = curve(model, arguments.device)
    if arguments.svg:
        draw(curves, arguments.svg)


if __name__ == "__main__":
    main()
