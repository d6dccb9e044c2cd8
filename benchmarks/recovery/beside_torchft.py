"""torchft under the kills of `benchmarks.recovery.bench`: the same model, batch and rhythm.

    python -m benchmarks.recovery.beside_torchft [--replicas 4] [--steps 100] [--every 15]

Needs torchft beside torch. Each replica group has one process, and its part of the batch. A random
one is killed every so many seconds, and started again at once. A step that was committed by fewer
replicas had fewer samples, so steps and samples are counted apart. Parameters at the end are
compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import announce
from benchmarks.recovery.runs import MODEL
from plait import models
from plait.engine.seeds import derive_seed

GLOBAL_BATCH = 16
SEQ_LEN = 64
TIMEOUT = timedelta(seconds=20)
HEARTBEAT_MS = 1000
LIMIT_SECONDS = 400.0
LOOK_SECONDS = 0.02


def work(number: int, num_replicas: int, steps: int, folder: Path) -> None:
    """Train as one replica group, until so many steps are committed."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_replicas))
    torch.manual_seed(0)
    keys = dict(MODEL)
    model = models.make(keys.pop("name"), **keys)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=max(1, num_replicas // 2),
        replica_id=f"replica-{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        use_async_quorum=True,
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    log = (folder / f"replica-{number}.jsonl").open("a")
    (folder / f"replica-{number}.ready").touch()
    while len(list(folder.glob("*.ready"))) < num_replicas:  # all of them do the first step
        time.sleep(LOOK_SECONDS)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        inputs, targets = batch(manager.current_step(), number, num_replicas)
        logits = parallel(inputs)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            line = {"who": number, "at": time.monotonic(), "step": before + 1}
            print(
                json.dumps({**line, "replicas": manager.num_participants()}), file=log, flush=True
            )
    torch.save(model.state_dict(), folder / f"replica-{number}.pt")
    os._exit(0)  # its threads would wait for peers


def batch(step: int, number: int, num_replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A replica's samples of a step."""
    own = torch.Generator().manual_seed(derive_seed(0, "samples", step))
    tokens = torch.randint(0, MODEL["vocab_size"], (GLOBAL_BATCH, SEQ_LEN + 1), generator=own)
    part = tokens.chunk(num_replicas)[number]
    return part[:, :-1], part[:, 1:]


class Group:
    """The processes of all replica groups, and their lighthouse."""

    def __init__(self, num_replicas: int, steps: int, folder: Path) -> None:
        from torchft.coordination import LighthouseServer

        self.folder = folder
        self.kills: list[tuple[float, int]] = []
        self._words = (str(num_replicas), str(steps), str(folder))
        self._lighthouse = LighthouseServer(
            bind="0.0.0.0:0",
            min_replicas=max(1, num_replicas // 2),
            join_timeout_ms=1000,
            heartbeat_timeout_ms=HEARTBEAT_MS,
        )
        port = self._lighthouse.address().rpartition(":")[2]
        self._address = f"http://127.0.0.1:{port}"
        self.began = time.monotonic()
        self._replicas = {number: self._start(number) for number in range(num_replicas)}

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        log = (self.folder / f"replica-{number}.txt").open("ab")
        words = (sys.executable, "-m", "benchmarks.recovery.beside_torchft", "--work", str(number))
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": self._address}
        return subprocess.Popen(
            [*words, *self._words], stdout=log, stderr=log, env=environment, cwd=Path.cwd()
        )

    def run(self, every: float, num_kills: int, chance: random.Random) -> float:
        """Seconds until the first replica has done all steps."""
        due = time.monotonic() + every
        while not any(self.folder.glob("*.pt")):
            now = time.monotonic()
            if now - self.began > LIMIT_SECONDS:
                raise TimeoutError(f"no replica was done after {LIMIT_SECONDS:g} s")
            for number, one in self._replicas.items():
                if one.poll() not in (None, 0):
                    self._replicas[number] = self._start(number)
            if len(self.kills) < num_kills and now >= due and self.lines():
                victim = chance.choice(list(self._replicas))
                self._replicas[victim].send_signal(signal.SIGKILL)
                self._replicas[victim].wait()
                self.kills.append((time.monotonic(), victim))
                due = now + every
            time.sleep(LOOK_SECONDS)
        return time.monotonic() - self.began

    def lines(self) -> list[dict[str, Any]]:
        """Every step that any replica has committed."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            whole = [line for line in path.read_text().split("\n") if line.endswith("}")]
            found += [json.loads(line) for line in whole]
        return sorted(found, key=lambda line: line["at"])

    def end(self) -> None:
        """Leave no process behind."""
        time.sleep(1.0)
        for one in self._replicas.values():
            one.kill()
            one.wait()
        self._lighthouse.shutdown()


@dataclass(frozen=True)
class Ran:
    """The steps that replicas have committed, kills by moment and victim, and the last parameters.

    Seconds count from the first step on, since starts are not compared.
    """

    lines: list[dict[str, Any]]
    kills: list[tuple[float, int]]
    parameters: dict[str, torch.Tensor]

    @property
    def seconds(self) -> float:
        return float(self.lines[-1]["at"] - self.lines[0]["at"])

    def next_steps(self, *, whole: bool) -> list[float]:
        """The seconds from each kill to the next step of those that are left, or of all again.

        A step of all that had been summed before the kill is none of them.
        """
        return [self._next_step(*kill, whole=whole) for kill in self.kills]

    def _next_step(self, moment: float, victim: int, *, whole: bool) -> float:
        full = max(one["replicas"] for one in self.lines)
        for one in self.lines:
            is_back = one["who"] == victim and one["replicas"] == full
            if one["at"] > moment and (is_back or (not whole and one["replicas"] < full)):
                return float(one["at"] - moment)
        return math.inf


def trained(num_replicas: int, steps: int, every: float, num_kills: int) -> Ran:
    """A run of replicas, of which random ones are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        group = Group(num_replicas, steps, folder)
        try:
            group.run(every, num_kills, random.Random(1))
        finally:
            group.end()
        lines = group.lines()
        found = torch.load(min(folder.glob("*.pt")), weights_only=True)
    return Ran(lines, group.kills, found)


def differences(ran: Ran, calm: Ran) -> float:
    """The largest difference of a parameter at the end."""
    pairs = ((one, ran.parameters[name]) for name, one in calm.parameters.items())
    return max(float((one - other).abs().max()) for one, other in pairs if one.numel())


def report(num_replicas: int, steps: int, every: float) -> None:
    """Print what an undisturbed and a disturbed run have measured."""
    calm = trained(num_replicas, steps, every, 0)
    again = trained(num_replicas, steps, every, max(1, int(calm.seconds / every)))
    by_step: dict[int, int] = {line["step"]: line["replicas"] for line in again.lines}
    samples = sum(by_step.values()) / (num_replicas * len(by_step))
    useful = calm.seconds / again.seconds
    print(f"replicas              {num_replicas}")
    print(f"steps                 {steps}, {calm.seconds / steps * 1e3:.0f} ms each undisturbed")
    print(f"kills                 {len(again.kills)} in {again.seconds:.0f} s, each {every:g} s")
    print(f"useful by steps       {useful:.2f}")
    print(f"useful by samples     {useful * samples:.2f}")
    for name, whole in (("to the next step", False), ("to a step of all", True)):
        moved = again.next_steps(whole=whole)
        print(f"{name:22}{statistics.median(moved):.2f} s, at most {max(moved):.2f} s")
    print(
        f"largest difference    {differences(again, calm):.3g} of a parameter at the end",
        flush=True,
    )


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    words = parser.parse_args()
    announce()
    report(words.replicas, words.steps, words.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
