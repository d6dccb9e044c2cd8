"""What snapshots and checkpoints cost a step of one device, measured: `python -m
tests.accelerator.stalls`.

Ways to train take turns, in groups of steps between two synchronisations. A row has the median of
its groups, and how much longer than the same step without copies. The parts of a copy follow.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.gpu.measuring import wait
from benchmarks.gpu.models import SUBJECTS, Subject
from benchmarks.gpu.steps import adamw, backend, place
from benchmarks.machine import announce
from torch import Tensor

from plait import comm
from plait.checkpoint.memory import MemoryFile
from plait.checkpoint.room import Room, side_stream_of
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.state.saves_behind import SavesBehind
from plait.engine.state.snapshots import Snapshots
from plait.launcher.board import Files
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.run.copier import Copier

GROUP = 12
TURNS = 5
Act = Callable[[int], None]


class Training:
    """An engine with its snapshots and checkpoints, and where the host's time at them went.

    Attributes:
        host_seconds: of the thread of the steps, by what it did.
    """

    def __init__(self, engine: Engine, folder: Path, memory: Files) -> None:
        self.host_seconds: dict[str, list[float]] = defaultdict(list)
        self.engine = engine
        self.snapshots = Snapshots([memory.make(), memory.make()], engine)
        self._saves = SavesBehind(engine)
        self._copier = Copier()
        self._folder = folder
        self._save: Any = None
        self._turn = 0

    def snapshot(self, index: int) -> None:
        """Begin a snapshot, which the next step waits for before its update."""
        self._turn += 1
        self._copier.wait()
        with_time = self._timed
        copy = with_time("begin a snapshot", lambda: self.snapshots.begin(self._turn, {}))
        self._copier.begin(copy)
        waited = self._copier.wait
        self.engine.copies.add(lambda: with_time("wait for a snapshot", waited))

    def held_snapshot(self, index: int) -> None:
        """Make a snapshot, and wait for it at once."""
        self._turn += 1
        self.snapshots.take(self._turn, {})

    def checkpoint(self, index: int) -> None:
        """Begin a checkpoint, one in each group."""
        if index:
            return
        self._turn += 1
        path = self._folder / str(self._turn)
        with_time = self._timed
        save = with_time("begin a checkpoint", lambda: self._saves.begin(path, {}, lambda: None))
        self._save = save
        self.engine.copies.add(lambda: with_time("wait for its copy", save.wait_for_copy))

    def end(self) -> None:
        """Wait for all copies and files; these are removed."""
        self.engine.copies.wait()
        self._copier.wait()
        if self._save is not None:
            self._save.wait()
            assert self._save.failure is None, self._save.failure
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def _timed(self, what: str, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = act()
        self.host_seconds[what].append(time.perf_counter() - began)
        return made


def seconds_of_steps(
    training: Training, batch: tuple[Tensor, Tensor], act: Act, group: int, device: str
) -> float:
    """Of one step, in a group with `act` after each step but the last."""
    step = training.engine.step
    step(batch, trace=False)
    wait(device)
    began = time.perf_counter()
    for index in range(group):
        act(index)
        step(batch, trace=False)
    wait(device)
    return (time.perf_counter() - began) / group


def parts_of_a_copy(training: Training, memory: Path, device: str) -> dict[str, float | str]:
    """Seconds of each part of a copy, the second time that it is made."""
    from plait.engine.state.listed import listed_of

    seconds: dict[str, float | str] = {}
    shards = listed_of(training.engine).shards()
    side = side_stream_of(training.engine.world.device)
    room = Room(side)
    path = memory / "part"
    path.touch()
    file = MemoryFile(path)
    for _ in range(2):
        wait(device)
        began = time.perf_counter()
        room.mark()
        held = room.copy(shards)
        seconds["device to pinned memory"] = time.perf_counter() - began
        began = time.perf_counter()
        file.write(1, held, {})
        seconds["from there to the file"] = time.perf_counter() - began
    files = Files(memory)
    direct = MemoryFile(files.make(), Room(side))
    for when in ("the first time, with its pinning", "later"):
        wait(device)
        began = time.perf_counter()
        direct.write(1, shards, {})
        taken = f"device to a file in memory, {when}"
        seconds[taken] = time.perf_counter() - began
    seconds["the file in memory"] = "pinned" if direct.content().is_pinned() else "not pinned"
    files.close()
    return seconds


def measured(subject: Subject, plan: str, options: argparse.Namespace) -> None:
    """Print the rows of one model under one plan."""
    device, group, turns = options.device, options.group, options.turns
    world = comm.init(Mesh(), device=place(device))
    engine = build(
        subject.model(place(device)),
        plan,
        loss=cross_entropy,
        optimizer=adamw,
        options=Options(compile_backend=backend(device), cuda_graphs=options.graphs),
        world=world,
    )
    batch = subject.tokens(place(device))
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=shared) as memory,
    ):
        files = Files(Path(memory))
        training = Training(engine, Path(folder), files)
        ways: dict[str, Act] = {
            "no copies": lambda index: None,
            "a snapshot each step": training.snapshot,
            "a snapshot every 4 steps": lambda i: None if i % 4 else training.snapshot(i),
            "a snapshot each step, waited for at once": training.held_snapshot,
            f"a checkpoint every {group} steps": training.checkpoint,
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 1):  # the first makes the memory
            names = list(ways)
            for name in names if turn % 2 else names[::-1]:
                one = seconds_of_steps(training, batch, ways[name], group, device)
                training.end()
                found[name].append(one)
        alone = median(found["no copies"][1:])
        way = f"{plan}, in graphs" if options.graphs else plan
        print(f"{subject.title}, {way}: {training.snapshots.num_bytes / 1e9:.3f} GB a snapshot")
        for name, seconds in found.items():
            later = sorted(seconds[1:])
            one = median(later)
            print(
                f"{name}: {1e3 * one:.2f} ms a step ({1e3 * later[0]:.2f} to {1e3 * later[-1]:.2f},"
                f" the first group {1e3 * seconds[0]:.2f}), {100 * (one / alone - 1):+.2f} %"
            )
        for name, seconds in training.host_seconds.items():
            print(f"the thread of the steps, {name}: {1e3 * median(seconds):.3f} ms (median)")
        for name, value in parts_of_a_copy(training, Path(memory), device).items():
            print(f"{name}: {value if isinstance(value, str) else f'{1e3 * value:.2f} ms'}")
        files.close()
    world.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plan", default="dp1 precision:bf16 compile")
    parser.add_argument("--graphs", action="store_true", help="steps are CUDA graphs")
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args(words)
    announce()
    is_there = options.device == "cuda"
    print(torch.cuda.get_device_name() if is_there else "a trial on the processor", file=sys.stderr)
    subject = SUBJECTS[0] if is_there else SUBJECTS[0].small()
    measured(subject, options.plan, options)


if __name__ == "__main__":
    main()
