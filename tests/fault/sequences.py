"""Runs are killed, resumed, and resumed again under other plans; the samples must come as to a run
that nobody disturbed: each once, in one order.

    python -m tests.fault.sequences --count 100 --seed 1
    python -m tests.fault.sequences --count 100 --seed 21 --seconds 540
    python -m tests.fault.sequences --count 20 --source iterable

A sequence is drawn from its seed alone. Its ranks are processes, and a kill is SIGKILL. Each rank
writes down the samples of every step; those of the disturbed run must be bit-equal to the calm
one's. A quarter of the sequences trains by `plait train --resume auto`, and its losses must be
equal to 1e-9 in float64. The ranks of the others read and save their place, and train nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plait.cli import main as plait
from plait.datasets.loader import bounds
from plait.plan import Plan
from plait.run import kept
from tests.fault.kills import living_process
from tests.fault.processes import is_running
from tests.fault.reading import (
    LIBRARY,
    NUM_SAMPLES,
    RUN,
    SOURCES,
    STEPS,
    plain_run,
    read_alone,
    recorded,
    write_sources,
)

TOLERANCE: Final = 1e-9
PLANS: Final = (
    "dp1", "dp2", "dp3:ring", "dp2:zero3", "dp4:zero1", "tp2", "tp2 dp2", "pp2", "cp2:ring dp2",
)  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """A part of a run: its plan, its threads that read ahead, and how it ends.

    Attributes:
        steps: steps that it does, after which it is killed or ends; None for all that are left.
        killed: the ranks that get SIGKILL so many `seconds` later; none for an end in peace.
    """

    plan: str
    workers: int
    steps: int | None
    killed: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Sequence:
    """The stretches of one run over a source."""

    seed: int
    source: str
    checkpoint_every: int
    stretches: tuple[Stretch, ...]
    trains: bool

    @staticmethod
    def draw(seed: int, source: str | None = None) -> Sequence:
        """The sequence of a seed: up to four disturbances, then the rest in peace.

        Without a source the seed chooses one.
        """
        chance = random.Random(seed)
        source = source or list(SOURCES)[seed % len(SOURCES)]
        stretches = [_disturbed(chance) for _ in range(chance.randint(2, 4))]
        last = Stretch(chance.choice(PLANS), chance.choice((0, 1, 2)), None)
        trains = seed // len(SOURCES) % 4 == 0
        return Sequence(seed, source, chance.choice((1, 2, 3)), (*stretches, last), trains)


def _disturbed(chance: random.Random) -> Stretch:
    plan = chance.choice(PLANS)
    size = Plan.parse(plan).world_size
    workers = chance.choice((0, 1, 2))
    steps = chance.randint(0, 4)
    if chance.random() < 0.3:
        return Stretch(plan, workers, steps)
    killed = chance.choice((tuple(range(size)), (chance.randrange(size),)))
    return Stretch(plan, workers, steps, killed, chance.uniform(0, 0.05))


class Judge:
    """Runs sequences, and compares each with the calm run of its source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calm: dict[tuple[str, bool], tuple[list[list[int]], list[float]]] = {}
        write_sources(folder)
        multiprocessing.set_forkserver_preload(["tests.fault.reading"])
        multiprocessing.forkserver.ensure_running()  # ranks of plait come from it too

    def judge(self, case: Sequence) -> list[str]:
        """What is wrong with the disturbed run; nothing where all is well."""
        if (case.source, case.trains) not in self._calm:
            found = self._calm_run(case)
            if found:
                return [f"the calm run: {one}" for one in found]
        folder = self._run(case)
        batches, losses = self._calm[case.source, case.trains]
        found = _differences(folder, batches)
        return found if not case.trains else [*found, *_missing(folder), *_others(folder, losses)]

    def _calm_run(self, case: Sequence) -> list[str]:
        """Keep the batches and losses of the calm run; what is wrong with it."""
        calm = Sequence(-1, case.source, STEPS, (Stretch("dp1", 0, None),), case.trains)
        folder = self._run(calm)
        batches = [parts[0, 1] for _, parts in sorted(_read(folder).items())]
        self._calm[case.source, case.trains] = batches, _losses(folder)
        return [*_unlawful(case.source, batches), *(_missing(folder) if case.trains else ())]

    def _run(self, case: Sequence) -> Path:
        folder = self._folder / f"{case.source}-{case.seed}-{case.trains}"
        (folder / "read").mkdir(parents=True)
        kept.run = recorded
        try:
            for number, stretch in enumerate(case.stretches):
                (folder / "stretch").write_text(str(number))
                do = self._train if case.trains else self._read_alone
                do(case, stretch, folder)
        finally:
            kept.run = plain_run
        return folder

    def _read_alone(self, case: Sequence, stretch: Stretch, folder: Path) -> None:
        """One stretch of ranks that only read. A kill takes all of them."""
        size = Plan.parse(stretch.plan).world_size
        context = multiprocessing.get_context("forkserver")
        barrier = context.Barrier(size)
        config = self._folder / f"{case.source}.toml"
        steps = None if stretch.killed else stretch.steps
        words = (config, folder, stretch.workers, steps, case.checkpoint_every, barrier)
        ranks = [context.Process(target=read_alone, args=(n, size, *words)) for n in range(size)]
        for rank in ranks:
            rank.start()
        if stretch.killed:
            number = (folder / "stretch").read_text()
            while any(rank.is_alive() for rank in ranks):
                if _steps_read(folder, number) >= (stretch.steps or 0) + 1:
                    break
                time.sleep(0.002)
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            rank.join()
            if rank.exitcode and not stretch.killed:
                raise RuntimeError(f"a rank that reads ended with {rank.exitcode}")

    def _train(self, case: Sequence, stretch: Stretch, folder: Path) -> None:
        """One stretch; it may end in any way that its kills bring about."""
        done = len(_losses(folder))
        words = [
            *("train", str(self._folder / f"{case.source}.toml"), "--out", str(folder / RUN)),
            *("--resume", "auto", "--plan", f"{stretch.plan} precision:float64", "--json"),
            *("--set", f"data.workers={stretch.workers}"),
            *("--set", f"train.checkpoint_every={case.checkpoint_every}"),
        ]
        if stretch.steps is not None and not stretch.killed:
            words += ["--steps", str(min(STEPS, max(1, done + stretch.steps)))]
        ended = threading.Event()
        killer = threading.Thread(target=_kill, args=(stretch, folder, ended), daemon=True)
        killer.start()
        try:
            with (folder / "said.txt").open("a") as said:
                sys.stdout, sys.stderr = said, said
                code = plait(words)
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            ended.set()
            killer.join()
        if code and not stretch.killed:
            tail = (folder / "said.txt").read_text()[-400:]
            raise RuntimeError(f"a stretch in peace ended with {code}: {tail}")


def _kill(stretch: Stretch, folder: Path, ended: threading.Event) -> None:
    """Send SIGKILL to the ranks that a stretch names, once it has done its steps."""
    if not stretch.killed:
        return
    number = (folder / "stretch").read_text()
    while _steps_read(folder, number) < (stretch.steps or 0) + 1:
        if ended.wait(0.002):
            return
    time.sleep(stretch.seconds)
    victims = [living_process(rank) for rank in stretch.killed]
    for process in victims:
        if process is not None and is_running(process.pid):
            os.kill(process.pid, signal.SIGKILL)


def _steps_read(folder: Path, stretch: str) -> int:
    """The most batches that a rank of a stretch has read."""
    files = (folder / "read").glob(f"{stretch}-*.jsonl")
    return max((file.read_text().count("\n") for file in files), default=0)


def _read(folder: Path) -> dict[int, dict[tuple[int, int], list[int]]]:
    """The samples that were read, by step, and in it by (coordinate, number of coordinates)."""
    found: dict[int, dict[tuple[int, int], list[int]]] = {}
    for file in sorted((folder / "read").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            step, rank, size, samples = json.loads(line)
            before = found.setdefault(step, {}).setdefault((rank, size), samples)
            if before != samples:
                raise RuntimeError(f"step {step}: {samples} and {before} for {rank} of {size}")
    return found


def _differences(folder: Path, batches: list[list[int]]) -> list[str]:
    """Steps that read other samples than the calm run, or not all of them."""
    found = []
    read = _read(folder)
    if sorted(read) != list(range(1, STEPS + 1)):
        return [f"the steps {sorted(read)} were read"]
    for step, parts in read.items():
        sizes = {size for _, size in parts}
        if not any(all((rank, size) in parts for rank in range(size)) for size in sizes):
            found.append(f"step {step}: only the parts {sorted(parts)} were read")
        batch = batches[step - 1]
        for (rank, size), samples in parts.items():
            first, last = bounds(len(batch), (1,) * size, rank)
            if samples != batch[first:last]:
                found.append(f"step {step}: {samples} instead of {batch[first:last]}")
    return found


def _others(folder: Path, losses: list[float]) -> list[str]:
    """Steps with other losses than the calm run's."""
    found = []
    for step, (mine, calm) in enumerate(zip(_losses(folder), losses, strict=True), 1):
        if not math.isclose(mine, calm, rel_tol=TOLERANCE):
            found.append(f"step {step}: loss {mine} instead of {calm}")
    return found


def _missing(folder: Path) -> list[str]:
    """Steps that the metrics do not have once, in their order."""
    steps = [json.loads(line)["step"] for line in _lines(folder)]
    return [] if steps == list(range(1, STEPS + 1)) else [f"the metrics have the steps {steps}"]


def _unlawful(source: str, batches: list[list[int]]) -> list[str]:
    """Samples that come twice before all of their set have come once."""
    read = [sample for batch in batches for sample in batch]
    found = []
    for number in (0, 1):
        mine = [sample for sample in read if sample >> 12 == number]
        size = NUM_SAMPLES if number == 0 else 17
        for begin in range(0, len(mine), size):
            epoch = mine[begin : begin + size]
            if len(set(epoch)) < len(epoch) or (
                len(epoch) == size and max(epoch) & 4095 != size - 1
            ):
                found.append(f"{source} {number}: {sorted(epoch)}")
    return found


def _lines(folder: Path) -> list[str]:
    path = folder / RUN / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _losses(folder: Path) -> list[float]:
    """The losses of the run so far."""
    found = []
    for line in _lines(folder):
        try:
            found.append(float(json.loads(line)["loss"]))
        except ValueError:  # a killed run left half a line
            continue
    return found


def main() -> int:
    """Judge sequences and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20, help="of sequences")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--source", choices=(*SOURCES, *LIBRARY), help="for all of them")
    words = parser.parse_args()
    end = time.monotonic() + words.seconds
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # runs tell of their progress, kills and resumes
    judged = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for seed in range(words.seed, words.seed + words.count):
            if time.monotonic() > end:
                print(f"out of time; go on with --seed {seed}")
                break
            case = Sequence.draw(seed, words.source)
            try:
                found = judge.judge(case)
            except Exception as error:  # the other sequences are to be seen too
                found = [f"{type(error).__name__}: {error}"]
            judged += 1
            failed += bool(found)
            verdict = f"DIFFERENT: {found[:3]}" if found else "equal"
            kills = sum(len(stretch.killed) for stretch in case.stretches)
            plans = ", ".join(stretch.plan for stretch in case.stretches)
            how = "trains" if case.trains else "reads"
            print(
                f"{seed:5} {case.source:9} {how:6} {kills} killed; {plans}: {verdict}", flush=True
            )
    print(f"{judged - failed} of {judged} sequences equal")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
