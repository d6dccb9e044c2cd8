"""Run in a process of its own: kill ranks with SIGKILL while they save behind the run's back.

    python -m tests.fault.killed_behind FOLDER [--seed 0] [--kills 20]

Two processes are the ranks, which save one step after the other as a run does. At a moment of the
seed one of them is killed, and the other a little later. What they left is read to its last byte,
swept, and saved to again. Prints a line of JSON for each kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

import torch

from plait.checkpoint import Checkpoint, Shard
from plait.checkpoint.behind import BackgroundSave, SaveMemory, Wanted
from plait.checkpoint.folder import is_whole, step_number, sweep

NUM_RANKS = 2
SIZE = 200_000
LONGEST_SECONDS = 0.25


def live(folder: Path, rank: int, first: int, last: int) -> None:
    """Save the steps from `first` to `last`, each of which fills its tensors with its number."""
    memory = SaveMemory()
    for step in range(first, last + 1):
        wanted = Wanted(
            folder / f"step-{step}",
            f"{step:012x}",
            [Shard.whole(f"w{rank}", torch.full((SIZE,), float(step)))],
            {"step": step},
            rank,
            NUM_RANKS,
        )
        save = BackgroundSave(wanted, lambda: None, memory)
        save.wait()
        assert save.failure is None, save.failure


def started(folder: Path, first: int, last: int) -> list[int]:
    """The processes of ranks that save so many steps."""
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            live(folder, rank, first, last)
            os._exit(0)
        pids.append(pid)
    return pids


def found(folder: Path) -> tuple[list[int], list[str]]:
    """The steps whose checkpoints are whole, and the names of what is left of others.

    Fails for a checkpoint that has its name and cannot be read, or holds another step.
    """
    steps = []
    left = []
    for path in sorted(folder.glob("step-*")):
        step = step_number(path)
        if step is None:
            left.append(path.name)
            continue
        assert is_whole(path), path
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        values = [checkpoint.tensor(f"w{rank}").unique().tolist() for rank in range(NUM_RANKS)]
        assert values == [[float(step)]] * NUM_RANKS, (path, values)
        steps.append(step)
    return sorted(steps), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    words = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(words.seed)
    for number in range(words.kills):
        folder = words.folder / f"{number}" / "checkpoints"
        folder.mkdir(parents=True)
        pids = started(folder, 1, 1_000_000)
        time.sleep(chance.uniform(0.0, LONGEST_SECONDS))
        chance.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.choice((0.0, 0.01)))
        for pid in pids:
            os.waitpid(pid, 0)
        steps, left = found(folder)
        removed = sweep(folder.parent, time.time() + 1.0)
        swept, nothing = found(folder)
        assert (swept, nothing) == (steps, []), (swept, nothing)
        after = max(steps, default=0) + 1
        for pid in started(folder, after, after):
            assert os.waitpid(pid, 0)[1] == 0
        again, nothing = found(folder)
        assert (again, nothing) == ([*steps, after], []), (again, nothing)
        assert Checkpoint.open(folder).meta["step"] == after
        print(json.dumps({"whole": len(steps), "left": left, "removed": len(removed)}), flush=True)


if __name__ == "__main__":
    main()
