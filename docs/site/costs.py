"""The tables of `which.md`: the costs of each strategy, and the bubble of each schedule.

`python docs/site/costs.py` writes them anew: the planner predicts costs, the simulator bubbles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import plait
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import simulate

PAGE = Path(__file__).parents[1] / "which.md"
CLUSTER = "h100x8"
CONFIG: dict[str, Any] = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
    },
    "data": {"seq_len": 2048},
    "train": {"global_batch": 64, "optimizer": "adamw"},
}
PLANS = {
    "dp8": "batch",
    "dp8:ring": "batch",
    "dp8:server": "batch",
    "dp8:zero1": "batch, optimizer",
    "dp8:zero2": "batch, optimizer, gradients",
    "dp8:zero3": "batch, optimizer, gradients, weights",
    "tp8:1d": "layers",
    "tp8:1d,sp": "layers, stream",
    "tp4:2d dp2": "layers on a square, batch",
    "tp8:2.5d,depth2": "layers on squares",
    "tp8:3d": "layers on a cube",
    "pp8:1f1b mb16": "depth",
    "pp8:zbv mb16": "depth, folded",
    "cp8:ring": "sequences",
    "cp8:ulysses": "sequences, then heads",
}
STAGES = 4
MICRO_BATCHES = 8
STREAM_STEPS = 3


def costs() -> str:
    """GB in the fullest rank by kind, and GB sent by a rank in a step, a row a plan."""
    lines = [
        "| plan | splits | weights | gradients | optimizer | activations | sent by a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan, splits in PLANS.items():
        guess = plait.estimate(CONFIG, plan=f"{plan} precision:bf16", cluster=CLUSTER)
        memory = guess.memory
        kinds = (memory.parameters, memory.gradients, memory.optimizer, memory.activations)
        sent = sum(guess.traffic.values())
        cells = [f"`{plan}`", splits, *(f"{value / 1e9:.2f}" for value in (*kinds, sent))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bubbles() -> str:
    """Bubble, activations and versions of the weights on the fullest rank, a row a schedule."""
    lines = [
        "| schedule | bubble | activations | versions of the weights | command |",
        "|---|---|---|---|---|",
    ]
    for name, generator in SCHEDULES.items():
        steps = STREAM_STEPS if generator.facts.asynchronous else 1
        schedule = make(name, STAGES, MICRO_BATCHES, 0, num_steps=steps)
        result = simulate(schedule)
        kept = max(result.peak_activations_per_rank)
        command = f"`plait schedule {name} --stages {STAGES} --microbatches {MICRO_BATCHES}`"
        cells = (f"`{name}`", f"{result.bubble_fraction:.0%}", f"{kept:g}")
        versions = str(max(result.weight_versions))
        lines.append(f"| {' | '.join((*cells, versions, command))} |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {"costs": costs, "bubbles": bubbles}


def place(name: str) -> re.Pattern[str]:
    """The lines of the page between the marks of a table."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- end of {name} -->)", re.S)


def written(name: str) -> str:
    """A table as the page has it."""
    match = place(name).search(PAGE.read_text(encoding="utf-8"))
    return "" if match is None else match[0]


def write() -> None:
    """Put the tables of today into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = table()
        print(text)
        page = place(name).sub(text.replace("\\", "\\\\"), page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
