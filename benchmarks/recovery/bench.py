"""How much of a run's time is useful when its ranks are killed, and what a recovery costs.

    python -m benchmarks.recovery.bench [--plans TEXT ...] [--steps 400] [--every 15]

Trains each plan twice: undisturbed, and with a random rank killed every so many seconds. A row has
the useful fraction (undisturbed seconds over those of the disturbed run), the seconds from a kill
to the next finished step, the steps that were repeated, the shares of a step that it waits for a
snapshot and for a checkpoint, and whether the bits are equal. A busy machine makes all of it noise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.kills import differences, living_process

from benchmarks.machine import announce
from plait.cli import replanning
from plait.config import Config
from plait.launcher.keeper import keep
from plait.launcher.seat import LaunchPlan
from plait.plan import Plan
from plait.run import kept
from plait.run.job import TrainingRun

NUM_CHECKPOINTS = 10
PLANS = ("dp4:zero1", "tp2 dp2", "pp2:1f1b dp2 mb2")
MODEL: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Row:
    """One plan."""

    plan: str
    useful_fraction: float
    num_kills: int
    recovery_seconds: float
    steps_repeated: int
    snapshot_fraction: float
    checkpoint_fraction: float
    is_equal: bool


def config_of(plan: str, steps: int, restarts: int) -> Config:
    """The run of a plan."""
    tables = {
        "model": MODEL,
        "data": {"name": "random", "seq_len": 64},
        "train": {
            "steps": steps,
            "global_batch": 16,
            "linear_product": "rule",
            "checkpoint_every": max(1, steps // NUM_CHECKPOINTS),
        },
        "plan": {"text": plan},
        "recovery": {"restarts": restarts, "snapshot_every": 1, "hang_seconds": 120.0},
    }
    return Config.load(tables)


def trained(config: Config, folder: Path, every: float, seed: int) -> tuple[float, dict[str, Any]]:
    """Seconds and summary of a run; a random rank is killed `every` so many seconds (0: never)."""
    plan = Plan.parse(config.plan.text)
    folder.mkdir(parents=True)
    job = TrainingRun(config, str(plan), folder, shows_progress=False, began=time.time() - 2)
    ended = threading.Event()
    killer = threading.Thread(target=_kill, args=(plan.world_size, every, seed, ended))
    if every:
        killer.start()
    began = time.perf_counter()
    try:
        layout = LaunchPlan(str(plan), plan.world_size)
        policy = replanning.policy(config, plan)
        result: dict[str, Any] = keep(kept.run, (job,), layout, policy).results[0]
    finally:
        ended.set()
    if every:
        killer.join()
    return time.perf_counter() - began, result


def _kill(num_ranks: int, every: float, seed: int, ended: threading.Event) -> None:
    chance = random.Random(seed)
    while not ended.wait(every):
        process = living_process(chance.randrange(num_ranks))
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)


def measure(plan: str, steps: int, every: float, folder: Path) -> Row:
    """The row of a plan."""
    name = plan.replace(" ", "_").replace(":", "-")
    calm = folder / f"calm-{name}"
    shaken = folder / f"shaken-{name}"
    calm_seconds, undisturbed = trained(config_of(plan, steps, 1), calm, 0.0, 0)
    seconds, result = trained(config_of(plan, steps, 10_000), shaken, every, 1)
    recoveries = result["recoveries"]
    moved = [one["seconds"] for one in recoveries if one["seconds"] is not None]
    step_seconds = undisturbed["step_seconds_median"]
    snapshot, checkpoint = (
        undisturbed[what]["seconds"] / max(1, undisturbed[what]["count"]) / step_seconds
        for what in ("snapshots", "checkpoints")
    )
    return Row(
        plan,
        calm_seconds / seconds,
        len(recoveries),
        statistics.median(moved) if moved else 0.0,
        sum(one["steps_repeated"] or 0 for one in recoveries),
        snapshot,
        checkpoint,
        not differences(calm, shaken),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    words = parser.parse_args()
    announce()
    head = (
        "plan",
        "useful",
        "kills",
        "recovery s",
        "repeated",
        "snapshot/step",
        "checkpoint/step",
        "equal bits",
    )
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    with tempfile.TemporaryDirectory() as folder:
        for plan in words.plans:
            row = measure(plan, words.steps, words.every, Path(folder))
            cells = (
                row.plan,
                f"{row.useful_fraction:.2f}",
                str(row.num_kills),
                f"{row.recovery_seconds:.2f}",
                str(row.steps_repeated),
                f"{row.snapshot_fraction:.1%}",
                f"{row.checkpoint_fraction:.1%}",
                "yes" if row.is_equal else "NO",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
