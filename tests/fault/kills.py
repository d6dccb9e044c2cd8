"""Ranks of random plans are killed at random moments; the run must end with the bits of one that
nobody disturbed.

    python -m tests.fault.kills --count 100
    python -m tests.fault.kills --from 20 --count 20 --seconds 540
    python -m tests.fault.kills --count 20 --copies pinned

A case is drawn from its seed alone, so any part of them can be run. Prints a line for each, and
fails at the end if one differed. `--seconds` begins none after so long. `--copies`: snapshots are
copied by a stand-in of a GPU's stream, into pinned files or by memory between.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import Checkpoint
from plait.cli import replanning
from plait.config import Config
from plait.launcher.keeper import keep
from plait.launcher.seat import LaunchPlan
from plait.plan import Plan
from plait.run import kept
from plait.run.job import TrainingRun
from tests.fault import staged
from tests.fault.processes import is_running

STEPS = 6
LIMIT_SECONDS = 120.0
SMALLEST = 1e-8  # the bias of keys has no gradient, and what it holds is rounding of 1e-22
GPT: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = {
    **GPT,
    "name": "llama",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MAINS = {"host": kept.run, "pinned": staged.into_pinned_files, "between": staged.by_memory_between}
DENSE = (
    "dp2", "dp3:ring", "dp2:server", "dp4:zero1", "dp4:zero2", "dp2:zero3",
    "dp4:zero3,replicate2", "dp2:zero1,offload", "tp2 dp2", "tp2:1d,sp dp2:zero3", "tp4:2d",
    "cp2:ring dp2", "cp2:ulysses dp2:zero1", "pp2:gpipe mb4", "pp2:1f1b dp2:zero1 mb2",
    "pp2:interleaved,v2 mb4", "pp2:zb-h1 tp2 mb4", "pp2:dualpipev mb4",
    "dp2 precision:bf16", "dp2 remat:full",
)  # fmt: skip
ROUTED = ("ep2 dp2", "ep2 dp4:zero1", "ep2 dp2 tp2", "pp2:1f1b ep2 dp2 mb2")


@dataclass(frozen=True)
class Kill:
    """The rank that is killed, so many seconds after a step was done; step 0 is the start."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A plan, and the moments at which ranks of it are killed."""

    seed: int
    plan: str
    kills: tuple[Kill, ...]

    @staticmethod
    def draw(seed: int) -> Case:
        """The case of a seed: one or two kills of a plan over any axis."""
        chance = random.Random(seed)
        plan = chance.choice(DENSE + ROUTED)
        size = Plan.parse(plan).world_size
        kills = [
            Kill(chance.randrange(size), chance.randrange(STEPS), chance.uniform(0, 0.05))
            for _ in range(chance.choice((1, 1, 2)))
        ]
        return Case(seed, plan, tuple(sorted(kills, key=lambda kill: kill.step)))

    def config(self) -> Config:
        """The run."""
        model = EXPERTS if "ep" in self.plan else GPT
        tables = {
            "model": model,
            "data": {"name": "random", "seq_len": 16},
            "train": {"steps": STEPS, "global_batch": 8, "lr": 1e-2, "linear_product": "rule"},
            "plan": {"text": self.plan},
            "recovery": {"restarts": 3, "hang_seconds": LIMIT_SECONDS},
        }
        return Config.load(tables)


def trained(
    case: Case, folder: Path, kills: tuple[Kill, ...], main: Callable[..., Any] = kept.run
) -> dict[str, Any]:
    """The summary of a run into a folder, whose ranks are killed meanwhile."""
    config = case.config()
    plan = Plan.parse(case.plan)
    job = TrainingRun(config, str(plan), folder, shows_progress=False, began=time.time() - 2)
    ended = threading.Event()
    killer = threading.Thread(target=_kill_all, args=(kills, folder, ended), daemon=True)
    killer.start()
    try:
        launched = LaunchPlan(str(plan), plan.world_size)
        result: dict[str, Any] = keep(
            main, (job,), launched, replanning.policy(config, plan)
        ).results[0]
    finally:
        ended.set()
        killer.join()
    return result


def _kill_all(kills: tuple[Kill, ...], folder: Path, ended: threading.Event) -> None:
    for kill in kills:
        while _steps_done(folder) < kill.step or not living_process(kill.rank):
            if ended.wait(0.002):
                return
        time.sleep(kill.seconds)
        process = living_process(kill.rank)
        if process is None:
            continue
        os.kill(process.pid, signal.SIGKILL)
        while is_running(process.pid) and not ended.wait(0.002):
            pass


def living_process(rank: int) -> Any:
    """The living process of a seat; None while it has none."""
    known = list(getattr(multiprocessing.process, "_children"))  # noqa: B009 - reaping is the launcher's
    named = [one for one in known if one.name == f"rank {rank}" and is_running(one.pid)]
    return named[-1] if named else None


def _steps_done(folder: Path) -> int:
    """The steps that a run has told of, those that were repeated counted again."""
    try:
        return (folder / "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0


def differences(left: Path, right: Path) -> list[str]:
    """The tensors of the newest checkpoints that do not have equal bits."""
    one = Checkpoint.open(left)
    other = Checkpoint.open(right)
    if one.meta["step"] != other.meta["step"] or set(one.names()) != set(other.names()):
        return ["the step or the names"]
    return [name for name in one.names() if not torch.equal(one.tensor(name), other.tensor(name))]


def largest_difference(left: Path, right: Path) -> float:
    """The largest difference of two newest checkpoints, relative to the largest of its tensor."""
    one = Checkpoint.open(left)
    other = Checkpoint.open(right)
    assert one.meta["step"] == other.meta["step"]
    differences = []
    for name in one.names():
        a, b = one.tensor(name).double(), other.tensor(name).double()
        scale = b.abs().max().clamp(min=SMALLEST)
        differences.append(float((a - b).abs().max() / scale))
    return max(differences)


class Judge:
    """Runs cases, and compares each with the undisturbed run of its plan."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def judge(
        self, case: Case, main: Callable[..., Any] = kept.run
    ) -> tuple[list[str], dict[str, Any]]:
        """What differs, and the summary of the disturbed run, whose ranks do `main`."""
        calm = self._folder / f"calm-{case.plan}".replace(" ", "_").replace(":", "-")
        if not calm.exists():
            calm.mkdir(parents=True)
            trained(case, calm, ())
        shaken = self._folder / f"seed-{case.seed}"
        shaken.mkdir(parents=True)
        result = trained(case, shaken, case.kills, main)
        found = differences(calm, shaken)
        shutil.rmtree(shaken, ignore_errors=True)
        return found, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="of seeds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--copies", choices=MAINS, default="host", help="of the killed ranks")
    words = parser.parse_args()
    end = time.monotonic() + words.seconds
    failed = 0
    judged = 0
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for seed in range(words.first, words.first + words.count):
            if time.monotonic() > end:
                print(f"out of time; go on with --from {seed}")
                break
            case = Case.draw(seed)
            try:
                found, result = judge.judge(case, MAINS[words.copies])
                recovered = [one["seconds"] for one in result["recoveries"]]
            except Exception as error:  # the other cases are to be seen too
                found, recovered = [f"{type(error).__name__}: {error}"], []
            judged += 1
            failed += bool(found)
            verdict = "bit-equal" if not found else f"DIFFERENT: {found[:3]}"
            print(f"{seed:5} {case.plan:26} {verdict}, recoveries {recovered}", flush=True)
    print(f"{judged - failed} of {judged} bit-equal")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
