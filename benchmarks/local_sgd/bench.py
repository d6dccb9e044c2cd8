"""Loss after equal tokens, and traffic: all-reduce, local SGD and DiLoCo with 1, 8 and 64 local
steps, in 32 and in 8 bits.

    python -m benchmarks.local_sgd.bench [--steps 512] [--ranks 4] [--out DIR]

A small GPT on the source of Python's standard library, AdamW inside. Every variant sees the same
samples in the same order; every 64 steps, where all ranks have just met, rank 0 computes the loss
on windows that none of them trains on. Traffic is what rank 0's ledger counted over all steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lines import lines
from benchmarks.machine import announce
from plait import models
from plait.datasets.text import stdlib
from plait.engine.build import Options, build, join_world
from plait.launcher import launch
from plait.models import losses
from plait.outer.options import Asynchrony
from plait.plan import Plan

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SEQ_LEN = 64
SAMPLES = 4
LOOK_EVERY = 64
HELD_OUT = 64
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


@dataclass(frozen=True)
class Variant:
    name: str
    plan: str
    asynchrony: Asynchrony = field(default_factory=Asynchrony)


def variants(ranks: int) -> list[Variant]:
    plans = {every: f"dp{ranks}:local,every{every}" for every in (1, 8, 64)}
    found = [Variant("all-reduce", f"dp{ranks}")]
    found += [
        Variant(f"DiLoCo, H = {every}", plan, Asynchrony(**DILOCO)) for every, plan in plans.items()
    ]
    eight_bits = Asynchrony(**DILOCO, compress="int8")
    found += [Variant(f"DiLoCo, H = {every}, int8", plans[every], eight_bits) for every in (8, 64)]
    found += [Variant(f"average, H = {every}", plan) for every, plan in plans.items()]
    return found


def train(variant: Variant, steps: int, lr: float) -> tuple[list[tuple[int, float]], int]:
    """(tokens of all ranks, loss) at every look, and the bytes that this rank sent. Runs in every
    rank.
    """
    torch.set_num_threads(1)
    plan = Plan.parse(variant.plan)
    world = join_world(plan)
    axis = world.axis("dp")
    with torch.device("meta"):
        model = models.make("gpt", **MODEL)
    engine = build(
        model,
        plan,
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        options=Options(seed=0, asynchrony=variant.asynchrony),
        world=world,
    )
    windows = stdlib(SEQ_LEN)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    held = order[:HELD_OUT]
    rest = order[HELD_OUT:]
    seen = [(0, look(engine, windows.batch(held)))]
    sent = 0
    for step in range(steps):
        begin = (step * axis.size + axis.rank) * SAMPLES
        result = engine.step(
            windows.batch(rest[torch.arange(begin, begin + SAMPLES) % len(rest)]), trace=False
        )
        sent += result.ledger.by_axis().get("dp", 0)
        if (step + 1) % LOOK_EVERY == 0:
            seen.append(
                ((step + 1) * axis.size * SAMPLES * SEQ_LEN, look(engine, windows.batch(held)))
            )
    world.close()
    return seen, sent


@torch.no_grad()
def look(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    engine.model.eval()
    total, count = losses.cross_entropy(engine.model(batch[0]), batch[1])
    engine.model.train()
    return float(total / count)


def table(found: dict[str, dict[str, Any]]) -> str:
    whole = found.get("all-reduce", next(iter(found.values())))["sent_bytes"]
    rows = ["| | loss after all tokens | sent by a rank, MB | of all-reduce |", "|---|---|---|---|"]
    for name, one in found.items():
        sent = one["sent_bytes"]
        rows.append(
            f"| {name} | {one['seen'][-1][1]:.3f} | {sent / 1e6:.2f} | {sent / whole:.4f} |"
        )
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    announce()
    kept = None if arguments.out is None else arguments.out / "loss.json"
    found: dict[str, dict[str, Any]] = (
        json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    )
    for variant in variants(arguments.ranks):
        if arguments.only and not any(word in variant.name for word in arguments.only):
            continue
        if variant.name in found:
            continue
        seen, sent = launch(train, variant, arguments.steps, arguments.lr, nproc=arguments.ranks)[0]
        found[variant.name] = {"seen": seen, "sent_bytes": sent}
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found, indent=1) + "\n")
        print(variant.name, *(f"{loss:.3f}" for _, loss in seen), sent, flush=True)
    print(table(found))
    if arguments.out is not None:
        ordered = {
            variant.name: found[variant.name]
            for variant in variants(arguments.ranks)
            if variant.name in found
        }
        series = {
            name: [(tokens / 1e3, loss) for tokens, loss in one["seen"][1:]]
            for name, one in ordered.items()
        }
        (arguments.out / "loss.svg").write_text(
            lines(
                series,
                "a small GPT on Python's source",
                "tokens of all ranks, thousands",
                "held-out loss",
            )
        )


if __name__ == "__main__":
    main()
