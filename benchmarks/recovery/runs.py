"""Runs that are disturbed on purpose: their configs, and the threads that kill their ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.fault.kills import living_process

from plait.cli import replanning
from plait.comm import World
from plait.config import Config
from plait.launcher.keeper import keep
from plait.launcher.seat import LaunchPlan, Seat
from plait.plan import Plan
from plait.run import kept
from plait.run.job import TrainingRun

NUM_CHECKPOINTS = 10
LOOK_SECONDS = 0.01
MODEL: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 256,
}


class CutShort(Exception):
    """A signal has ended a run before its last step, or came between two runs.

    Attributes:
        run: what was trained until then, where the run ended after a save.
    """

    def __init__(self, number: int, run: Trained | None = None) -> None:
        super().__init__(number)
        self.number = number
        self.run = run


def cut_short(number: int, frame: object) -> None:
    """Raise `CutShort` for a signal. It is ignored from then on: `timeout` sends it twice."""
    signal.signal(number, signal.SIG_IGN)
    raise CutShort(number)


@dataclass(frozen=True)
class Trained:
    """A run that came to its end, or to that of a signal."""

    folder: Path
    seconds: float
    result: dict[str, Any]

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return float(self.result["step_seconds_median"])

    def seconds_of(self, num_steps: int) -> float:
        """The seconds of a longer run, whose further steps take this one's mean."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["seconds"] for line in lines]
        later = steps[len(steps) // 4 :]  # the first steps are slow for other reasons
        return self.seconds + (num_steps - len(steps)) * statistics.fmean(later)

    def slowed(self) -> float:
        """The time by which steps after a checkpoint are longer, in all, as a share of a step.

        Checkpoints are due every so many steps. Of these the first half is compared with the
        second, by medians over all checkpoints.
        """
        every = max(1, self.num_steps // NUM_CHECKPOINTS)
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        after: dict[int, list[float]] = {}
        for step in steps:
            if step["step"] > every:  # the first steps are slow for other reasons
                after.setdefault((step["step"] - 1) % every, []).append(step["seconds"])
        half = every // 2
        if not half:
            return 0.0
        middles = [statistics.median(after[place]) for place in range(every)]
        usual = statistics.median(middles[half:])
        return sum(middle - usual for middle in middles[:half]) / usual

    @property
    def num_steps(self) -> int:
        """The steps of the run that are done."""
        return int(self.result["stopped"] if "stopped" in self.result else self.result["steps"])

    def waited(self, what: str) -> float:
        """The wait of a step for one of its snapshots or checkpoints, as a share of the step."""
        cost = self.result.get(what, {})
        return cost.get("seconds", 0.0) / max(1, cost.get("count", 0)) / self.step_seconds


class Killer(Protocol):
    """What kills ranks of a run, until it has ended."""

    def live(self, num_ranks: int, folder: Path, ended: threading.Event) -> None:
        """Kill ranks of the run in a folder."""


@dataclass(frozen=True)
class KillEvery:
    """A random rank is killed every so many seconds, so often in all."""

    seconds: float
    seed: int
    num_kills: int

    def live(self, num_ranks: int, folder: Path, ended: threading.Event) -> None:
        chance = random.Random(self.seed)
        for _ in range(self.num_kills):
            if ended.wait(self.seconds):
                return
            kill(chance.randrange(num_ranks))


@dataclass(frozen=True)
class KillOnce:
    """Some ranks are killed together, once a step is done."""

    ranks: tuple[int, ...]
    at_step: int

    def live(self, num_ranks: int, folder: Path, ended: threading.Event) -> None:
        metrics = folder / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < self.at_step:
            if ended.wait(LOOK_SECONDS):
                return
        for rank in self.ranks:
            kill(rank)


def kill(rank: int) -> None:
    """Kill a rank that lives."""
    process = living_process(rank)
    if process is not None:
        os.kill(process.pid, signal.SIGKILL)


def config_of(plan: str, steps: int, restarts: int, replan: str = "never") -> Config:
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
        "cluster": {"name": "rtx4090x4"},  # so that a new plan need not measure this machine
        "recovery": {
            "restarts": restarts,
            "replan": replan,
            "snapshot_every": 1,
            "hang_seconds": 120.0,
        },
    }
    return Config.load(tables)


def trained(
    config: Config,
    folder: Path,
    killer: Killer | None = None,
    *,
    main: Callable[..., Any] = kept.run,
) -> Trained:
    """A run into a folder. Errors: `CutShort`."""
    plan = Plan.parse(config.plan.text)
    folder.mkdir(parents=True)
    job = TrainingRun(config, str(plan), folder, shows_progress=False, began=time.time() - 2)
    ended = threading.Event()
    threads = []
    if killer is not None:
        facts = (plan.world_size, folder, ended)
        threads.append(threading.Thread(target=killer.live, args=facts))
        threads[0].start()
    began = time.perf_counter()
    try:
        layout = LaunchPlan(str(plan), plan.world_size)
        policy = replanning.policy(config, plan)
        with job.supervision.outside():
            end = keep(main, (job,), layout, policy)
    except KeyboardInterrupt as error:
        raise CutShort(signal.SIGINT) from error
    except SystemExit as error:  # of a second signal
        raise CutShort(int(error.code or 0) - 128) from error
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    run = Trained(folder, time.perf_counter() - began, end.results[0])
    if end.signal:
        raise CutShort(end.signal, run)
    return run


def without_doctor(seat: Seat, job: TrainingRun) -> None:
    """`kept.run`, in ranks that keep no flight record."""

    def record_into(self: World, *_: object) -> None:
        pass

    World.record_into = record_into  # type: ignore[assignment]
    kept.run(seat, job)
