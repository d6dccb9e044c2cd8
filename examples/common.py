"""What the examples share: training in plain PyTorch, training under a plan, and a curve of both.

Every example defines a `Task` of functions at the top level of its file, trains it on one device
with nothing but PyTorch, trains it under a plan on several ranks, shows both curves, and asserts
that they are one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plait

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")


@dataclass(frozen=True)
class Task:
    """One training problem. `batch(step)` is the global batch of a step; `model()` has its values;
    all deterministic.
    """

    model: Callable[..., Any]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    steps: int
    lr: float = 3e-3

    def optimizer(self, params: Any) -> Any:
        """AdamW, with an eps that keeps rounding small where gradients are."""
        import torch

        return torch.optim.AdamW([p for p in params if p.requires_grad], lr=self.lr, eps=1e-5)


def options() -> argparse.Namespace:
    """`--small` for a run of seconds, `--out` for the folder of the curve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a setting that takes seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="where the curve goes (default: runs)"
    )
    return parser.parse_args()


def plain(task: Task) -> list[float]:
    """The losses of one device, in plain PyTorch."""
    import torch

    torch.manual_seed(0)
    model = task.model()
    losses = []
    optimizer = task.optimizer(model.parameters())
    for step in range(task.steps):
        inputs, targets = task.batch(step)
        total, count = task.loss(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    return losses


def parallel(
    task: Task,
    plan: str,
    first: int = 0,
    last: int | None = None,
    folders: tuple[Any, Any] = (None, None),
) -> list[float]:
    """The losses of this rank, steps `first` .. `last` - 1, from one checkpoint (or none) to
    another (or none).
    """
    import torch

    from plait.engine.build import join_world

    world = join_world(plait.Plan.parse(plan))
    torch.manual_seed(0)
    engine = plait.build(task.model(), plan, loss=task.loss, optimizer=task.optimizer, world=world)
    source, target = folders
    if source is not None:
        engine.load(source)
    axis = world.axis("dp")
    losses = []
    for step in range(first, task.steps if last is None else last):
        share = tuple(part.tensor_split(axis.size)[axis.rank] for part in task.batch(step))
        losses.append(engine.step(share, trace=False).loss)
    if target is not None:
        engine.save(target)
    world.close()
    return losses


def equal(found: Sequence[float], truth: Sequence[float], tolerance: float) -> float:
    """The largest relative difference of two curves; AssertionError where it is above the
    tolerance.
    """
    error = max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))
    assert error <= tolerance, f"the curves differ by {error:.1e}, more than {tolerance:.0e}"
    return error


def show(name: str, curves: dict[str, Sequence[float]], out: Path) -> Path:
    """Print the curves as a line of blocks each, and write them as one picture."""
    low = min(map(min, curves.values()))
    high = max(map(max, curves.values()))
    for label, losses in curves.items():
        blocks = "".join(
            "▁▂▃▄▅▆▇█"[round(7 * (loss - low) / ((high - low) or 1))] for loss in sample(losses, 60)
        )
        print(f"{label:>38}  {losses[0]:.4f} {blocks} {losses[-1]:.4f}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.svg"
    path.write_text(picture(name, curves, low, high))
    print(f"the curve: {path}")
    return path


def sample(values: Sequence[float], most: int) -> list[float]:
    """At most so many of them, evenly."""
    step = max(1, -(-len(values) // most))
    return list(values[::step])


def picture(name: str, curves: dict[str, Sequence[float]], low: float, high: float) -> str:
    """One self-contained SVG: a line a curve, dashed after the first so that equal ones both
    show.
    """
    width = 640
    height = 320
    parts = [f'<text x="8" y="16" font-size="14">{name}: loss by step</text>']
    for index, (label, losses) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        across = width / max(len(losses) - 1, 1)
        down = (height - 60) / ((high - low) or 1)
        points = " ".join(
            f"{i * across:.1f},{30 + (high - loss) * down:.1f}" for i, loss in enumerate(losses)
        )
        dash = ' stroke-dasharray="6 6"' if index else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(
            f'<text x="{width - 8}" y="{16 + 16 * index}" text-anchor="end" font-size="12" '
            f'fill="{colour}">{label}</text>'
        )
    parts.append(
        f'<text x="8" y="{height - 6}" font-size="12">{high:.4f} (top) to {low:.4f} (bottom)</text>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">\n{body}\n</svg>\n'
    )
