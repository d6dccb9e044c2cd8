"""Balancing by bias: the share of the busiest expert, step by step, on the source of Python's
standard library.

    python -m benchmarks.expert.balance [--steps 150] [--figure FILE.svg]

Two runs from the same start, with and without the bias; the busiest expert of the worst layer in
units of the mean, over the last WINDOW steps (a batch has some two thousand tokens of two or three
files, so its own load is mostly chance).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import announce
from plait import comm
from plait.config import Config
from plait.launcher import launch
from plait.mesh import Mesh
from plait.plan import Plan
from plait.run.assemble import assemble

MODEL = {
    "name": "llama", "num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
    "initializer_range": 0.08,
}  # fmt: skip
TRAIN = {"global_batch": 16, "lr": 2e-3}
SEQ_LEN = 128
SPEED = 0.01
LIMIT = 1.25
WINDOW = 10

Curve = list[tuple[tuple[tuple[float, ...], ...], float]]


def curve(steps: int, speed: float) -> Curve:
    """(tokens of each expert by layer, loss) of each step, on one rank."""
    torch.set_num_threads(1)
    keys = {**MODEL, **({"router_bias_update_speed": speed} if speed else {})}
    data = {"name": "stdlib", "seq_len": SEQ_LEN}
    config = Config.load({"model": keys, "data": data, "train": {**TRAIN, "steps": steps}})
    world = comm.init(Mesh())
    training = assemble(config, Plan.parse("dp1"), world)
    batches = iter(training.loader)
    found = []
    for _ in range(steps):
        result = training.engine.step(next(batches), trace=False)
        assert result.load is not None
        found.append((result.load.by_layer, result.loss))
    world.close()
    return found


def busiest(found: Curve) -> list[float]:
    """Of each step and those before it, WINDOW in all: the busiest expert of the worst layer in
    units of the mean.
    """
    loads = torch.tensor([by_layer for by_layer, _ in found])
    windows = [loads[max(step + 1 - WINDOW, 0) : step + 1].sum(0) for step in range(len(loads))]
    return [float((window.amax(-1) / window.mean(-1)).max()) for window in windows]


def draw(curves: dict[str, Sequence[float]], path: Path) -> None:
    """One line a run; the limit is dashed."""
    width = 640.0
    height = 300.0
    left = 48.0
    bottom = 40.0
    steps = max(map(len, curves.values()))
    top = max(max(values) for values in curves.values())

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (width - left - 16) * step / max(steps - 1, 1)
        return x, height - bottom - (height - bottom - 16) * (value - 1) / (top - 1)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return (
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" '
            f"{style}/>"
        )

    def text(x: float, y: float, words: str, anchor: str = "start") -> str:
        return (
            f'<text x="{x:.0f}" y="{y:.0f}" font-size="12" font-family="sans-serif" '
            f'text-anchor="{anchor}">{words}</text>'
        )

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">']
    parts.append(f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>')
    for value in range(1, int(top) + 1):
        y = place(0, value)[1]
        parts += [
            line([(left, y), (width - 16, y)], 'stroke="#dddddd"'),
            text(left - 8, y + 4, str(value), "end"),
        ]
    for step in range(0, steps, max(steps // 5, 1)):
        parts.append(text(place(step, 1)[0], height - bottom + 18, str(step), "middle"))
    parts.append(
        line([place(0, LIMIT), place(steps - 1, LIMIT)], 'stroke="#888888" stroke-dasharray="4 4"')
    )
    for index, (name, values) in enumerate(curves.items()):
        color = ("#b0413e", "#2a6f97")[index % 2]
        parts.append(
            line(
                [place(step, value) for step, value in enumerate(values)],
                f'stroke="{color}" stroke-width="1.6"',
            )
        )
        parts.append(
            f'<rect x="{width - 190:.0f}" y="{20 + 18 * index}" width="14" height="4" '
            f'fill="{color}"/>'
        )
        parts.append(text(width - 170, 26 + 18 * index, name))
    parts.append(text(width / 2, height - 6, "step", "middle"))
    parts += [text(left, 12, "busiest expert of the worst layer, in units of the mean"), "</svg>"]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    announce()
    curves = {}
    for name, speed in (("without", 0.0), ("balanced by bias", SPEED)):
        found = launch(curve, args.steps, speed, nproc=1)[0]
        curves[name] = busiest(found)
        print(
            f"{name:18} busiest expert {curves[name][0]:.2f} x the mean at first, "
            f"{curves[name][-1]:.2f} over the last "
            f"{WINDOW} steps; loss {found[0][1]:.3f} -> {found[-1][1]:.3f}"
        )
    if args.figure is not None:
        draw(curves, args.figure)


if __name__ == "__main__":
    main()
