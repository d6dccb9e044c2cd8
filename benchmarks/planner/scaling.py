"""Weak scaling from 8 to 131,072 devices: the best plan at each size, and the size from which each axis is worth having.

    python -m benchmarks.planner.scaling [--svg FILE]

The batch grows with the devices to the largest in use (64 M tokens) and then stays: beyond it, data parallelism has nothing
left to divide and the other axes must carry the growth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from plait.planner.choose import NothingFits, choose

SIZES = tuple(8 * 4**power for power in range(8))
SEQ_LEN = 8192
LARGEST_BATCH = 8192
MODELS = {
    "dense 8B": {
        **{"name": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 14336, "vocab_size": 128256},
    },
    "experts 16x, 20B": {
        **{"name": "llama", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"intermediate_size": 8192, "vocab_size": 128256, "num_local_experts": 16, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 8192},
    },
}


def curve(model: dict[str, object], device: str) -> list[tuple[int, str, float, float]]:
    """(devices, plan, tokens a second and device, MFU) at each size; sizes where nothing fits are left out."""
    points = []
    for size in SIZES:
        batch = min(LARGEST_BATCH, size * 2)
        started = time.perf_counter()
        try:
            best = choose(
                {"model": model, "data": {"seq_len": SEQ_LEN}, "train": {"global_batch": batch}}, f"{device}x{size}", top=1
            )[0]
        except NothingFits as reason:
            print(f"{size:8} {reason}")
            continue
        seconds = time.perf_counter() - started
        data = best.as_dict()
        points.append((size, data["plan"], data["tokens_per_second_per_device"], data["mfu"]))
        print(f"{size:8} {data['tokens_per_second_per_device']:9.0f} {data['mfu']:7.1%} {seconds:5.1f} s  {data['plan']}")
    return points


def draw(curves: dict[str, list[tuple[int, str, float, float]]], path: Path) -> None:
    """MFU over devices, one line a model."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for name, points in curves.items():
        axes.plot([point[0] for point in points], [100 * point[3] for point in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices (h100)")
    axes.set_ylabel("predicted MFU, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--device", default="h100")
    arguments = parser.parse_args()
    curves = {}
    for name, model in MODELS.items():
        print(f"{name} on {arguments.device}: devices, tokens/s a device, MFU, time of the search, best plan")
        curves[name] = curve(model, arguments.device)
    if arguments.svg:
        draw(curves, arguments.svg)


if __name__ == "__main__":
    main()
