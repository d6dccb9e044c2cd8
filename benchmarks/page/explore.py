"""Seconds until the page of plans answers: one server, seventeen questions one after another.

`python -m benchmarks.page.explore` asks as the page does: 8 B parameters on 1,024 devices. The
first question is that of a page just opened. Four batches by four lengths follow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import urlencode, urlsplit, urlunsplit
from urllib.request import urlopen

from benchmarks.machine import announce
from plait.cli.explore import FIRST

MODEL: Final = "llama3-8b"
CLUSTER: Final = "h100x1024"
BATCHES: Final = (256, 512, 1024, 2048)
LENGTHS: Final = (2048, 4096, 8192, 16384)
AIM_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Asked:
    """One question: its batch and length, and seconds by the clock and of the processor."""

    name: str
    seconds: float
    processor_seconds: float


def processor_seconds(pid: int) -> float:
    """Seconds that a process has computed so far, from `/proc`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def answers() -> list[Asked]:
    """The questions, asked of a server of their own."""
    command = [sys.executable, "-m", "plait", "explore", MODEL, "--cluster", CLUSTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            page = urlsplit(server.stdout.readline().strip())
            url = urlunsplit(page._replace(path="/plan.json"))
            questions = [{}, *map(question, product(BATCHES, LENGTHS))]
            return [ask(url, server.pid, one) for one in questions]
        finally:
            server.terminate()


def question(sizes: tuple[int, int]) -> dict[str, str]:
    """The choices of samples and length that a reader changed."""
    return {"batch": str(sizes[0]), "sequence": str(sizes[1])}


def ask(url: str, pid: int, chosen: dict[str, str]) -> Asked:
    """One question as the page sends it."""
    first = {name: values[-1] for name, values in FIRST.items()}
    body = urlencode({**chosen, **first}).encode()
    before = processor_seconds(pid)
    began = time.perf_counter()
    with urlopen(url, body) as reply:
        found = json.load(reply)
    seconds = time.perf_counter() - began
    if not found["plans"]:
        raise SystemExit(f"no plan for {chosen}: {found['reason']}")
    name = " x ".join(chosen.values()) or "as opened"
    return Asked(name, seconds, processor_seconds(pid) - before)


def text(found: list[Asked]) -> str:
    """The table, and its sum."""
    lines = ["| batch x length | seconds | processor seconds |", "|---|---|---|"]
    lines += [f"| {one.name} | {one.seconds:.2f} | {one.processor_seconds:.2f} |" for one in found]
    for name in ("seconds", "processor_seconds"):
        numbers = [getattr(one, name) for one in found]
        over = sum(number > AIM_SECONDS for number in numbers)
        lines.append(
            f"\n{name.replace('_', ' ')}: median {median(numbers):.2f}, worst {max(numbers):.2f}, "
            f"first {numbers[0]:.2f}; {over} of {len(numbers)} above {AIM_SECONDS:g} s"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the processor's name and the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    announce()
    print(f"{MODEL} on {CLUSTER}\n\n{text(answers())}")


if __name__ == "__main__":
    main()
