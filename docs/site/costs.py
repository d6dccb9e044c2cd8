"""The tables of `which.md`: the costs of each strategy, when it pays, and the bubbles of schedules.

`python docs/site/costs.py` writes them anew: the planner predicts costs, the simulator bubbles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import plait
from plait.config.config import load
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import simulate
from plait.toml import parse_toml

PAGE = Path(__file__).parents[1] / "which.md"
CONFIG_TITLE = "wide.toml"
"""The config of the page, which its reader can save and ask about."""
CLUSTER = "h100x8"
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
EXPERTS = (
    "model.name=llama model.num_hidden_layers=16 model.intermediate_size=2048 "
    "model.num_local_experts=32 model.num_experts_per_tok=2 train.global_batch=32"
)
LONG = "data.seq_len=32768 model.max_position_embeddings=32768 train.global_batch=1"
CASES = (
    ("a faster step", "h100x8", "train.global_batch=8", ("dp1 mb8", "dp8")),
    ("optimizer does not fit", "rtx4090x8", "train.global_batch=8", ("dp8", "dp8:zero1")),
    (
        "gradients do not fit",
        "rtx4090x8",
        "train.global_batch=8 model.num_hidden_layers=48",
        ("dp8:zero1", "dp8:zero2"),
    ),
    (
        "weights do not fit",
        "rtx4090x8",
        "train.global_batch=8 model.num_hidden_layers=120",
        ("dp8:zero2 remat:full", "dp8:zero3 remat:full"),
    ),
    ("one long sample", "h100x8", LONG, ("dp1", "tp8:1d,sp", "cp8:ring", "cp8:ulysses")),
    (
        "slow links",
        "l40sx16",
        "",
        (
            "dp16:zero1",
            "dp2:zero1 tp8:1d,sp",
            "dp4:zero1 pp4:1f1b mb16",
            "dp4:zero1 pp4:zbv mb16",
        ),
    ),
    ("experts", "h100x8", EXPERTS, ("dp8:zero1", "dp8:zero1 ep8")),
)
"""Question, cluster, changes of the config, and the plans that are compared."""


def config() -> dict[str, Any]:
    """The config that the page shows."""
    block = re.search(
        rf'^```toml title="{CONFIG_TITLE}"\n(.*?)^```$',
        PAGE.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert block is not None
    return parse_toml(block[1], ValueError, CONFIG_TITLE)


def costs() -> str:
    """GB in the fullest rank by kind, and GB sent by a rank in a step, a row a plan."""
    lines = [
        "| plan | splits | weights | gradients | optimizer | activations | sent by a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan, splits in PLANS.items():
        guess = plait.estimate(config(), plan=f"{plan} precision:bf16", cluster=CLUSTER)
        memory = guess.memory
        kinds = (memory.parameters, memory.gradients, memory.optimizer, memory.activations)
        sent = sum(guess.traffic.values())
        cells = [f"`{plan}`", splits, *(f"{value / 1e9:.2f}" for value in (*kinds, sent))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cases() -> str:
    """What each strategy is for, a row a plan, with the command that answers so."""
    lines = [
        "| question | plan | fits | GB | seconds a step | GB sent | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for question, cluster, changes, plans in CASES:
        for plan in plans:
            whole_plan = f"{plan} precision:bf16"
            changed = load(config(), changes.split())
            guess = plait.estimate(changed, plan=whole_plan, cluster=cluster)
            sizes = (
                guess.memory.total / 1e9,
                guess.step_seconds,
                sum(guess.traffic.values()) / 1e9,
            )
            command = f'plait estimate {CONFIG_TITLE} --cluster {cluster} --plan "{whole_plan}"'
            command += f" --set {changes}" if changes else ""
            fits = "yes" if guess.fits else "no"
            cells = (
                question,
                f"`{plan}`",
                fits,
                *(f"{size:.2f}" for size in sizes),
                f"`{command}`",
            )
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


TABLES: Mapping[str, Callable[[], str]] = {"costs": costs, "cases": cases, "bubbles": bubbles}


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
