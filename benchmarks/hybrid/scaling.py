"""What 2, 4 and 8 ranks cost over the step of one process, by axis, and where it goes: `python -m benchmarks.hybrid.scaling`.

The ranks share this machine's cores, so the work of the whole step is the same under every plan, and its processor time is
what an axis adds: overhead = (ranks' processor seconds) / (one process's) - 1. The wall clock says it only where the
ranks do not outnumber the cores. Waiting is by the timeline: what a rank stood still for the messages of an axis.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import plait
from plait import models
from plait.engine.build import Options, build, join_world
from plait.models.losses import cross_entropy
from plait.plan import Plan
from plait.trace import breakdown

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
SEQ_LEN, SAMPLES = 128, 16
PLANS = (
    "mb2", "mb4", "mb8", "dp2", "dp4", "dp8", "dp2:zero3", "dp4:zero3", "dp8:zero3", "tp2", "tp4", "tp8", "pp2 mb4", "pp4 mb4",
    "pp8 mb8", "cp2", "cp4", "cp8", "pp2 tp2 mb4", "pp2 tp2 dp2 mb4",
)  # fmt: skip


def measure(text: str, steps: int) -> dict[str, Any]:
    """Medians over steps of wall and processor seconds, and the parts of a traced step, of this rank."""
    world = join_world(Plan.parse(text))
    with torch.device("meta"):
        model = models.make("gpt", **MODEL)
    engine = build(
        model,
        text,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        options=Options(),
        world=world,
    )
    axis = world.axis("dp")
    tokens = torch.randint(0, 256, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    share = tokens.tensor_split(axis.size)[axis.rank]
    batch, walls, works, traced = (share[:, :-1], share[:, 1:]), [], [], []
    for step in range(steps + 2):
        world.axis("world").barrier()
        wall, work = time.perf_counter(), time.process_time()
        result = engine.step(batch, trace=step % 2 == 1)
        if step >= 2:
            walls.append(time.perf_counter() - wall)
            works.append(time.process_time() - work)
            if step % 2 == 1:
                traced.append((result.timeline, walls[-1]))
    parts = breakdown.of_steps(traced).as_dict()
    world.close()
    return {"wall": statistics.median(walls), "work": statistics.median(works), "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="the raw numbers, as JSON")
    given = parser.parse_args()
    rows = {}
    for text in ("mb1", *given.plans):
        rows[text] = plait.launch(measure, text, given.steps, nproc=Plan.parse(text).world_size)
    if given.out is not None:
        given.out.write_text(json.dumps(rows))
    alone = rows["mb1"][0]
    print("| plan | ranks | wall ms | processor ms, all ranks | overhead | computing ms | waiting ms by axis | other ms |")
    print("|---|---|---|---|---|---|---|---|")
    for text, ranks in rows.items():
        work = sum(rank["work"] for rank in ranks)
        parts = breakdown.mean(_parts(rank["parts"]) for rank in ranks)
        waiting = ", ".join(f"{axis} {seconds * 1e3:.0f}" for axis, seconds in parts.waiting_seconds.items()) or "-"
        print(
            f"| {text} | {len(ranks)} | {max(rank['wall'] for rank in ranks) * 1e3:.0f} | {work * 1e3:.0f} "
            f"| {work / alone['work'] - 1:+.0%} | {parts.compute_seconds * 1e3:.0f} | {waiting} "
            f"| {parts.other_seconds * 1e3:.0f} |"
        )


def _parts(told: dict[str, Any]) -> breakdown.Breakdown:
    return breakdown.Breakdown(told["step_seconds"], told["compute_seconds"], told["waiting_seconds"])


if __name__ == "__main__":
    main()
