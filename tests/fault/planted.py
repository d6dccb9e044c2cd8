"""Planted faults: `python -m tests.fault.planted [--seed S] [--kind K ...] [--from I] [--count N]`.

A seed draws ten faults of each kind; a part of them is chosen by kind and number, from 0. Each is a
run of its own in which one rank commits one fault at one step. The doctor must name the rank, the
kind and the cause; hangs are timed besides. `--seconds` begins none after so long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 5
FAULTS_A_KIND = 10
RHYTHM = 2  # check_replicas_every
LIMIT_SECONDS = 150  # after the first step
START_SECONDS = 600  # before it, on a busy machine
CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
intermediate_size = 32
vocab_size = 64

[data]
python = "tests.fault.faulty:data"

[train]
steps = 100000
global_batch = 12
lr = 1e-3

[recovery]
hang_seconds = 5
check_replicas_every = 2
"""
PLANS = ("dp2", "dp3", "dp2:zero3", "dp2:zero1", "tp2", "pp2:1f1b mb4", "dp2 pp2:gpipe mb2")
SYNCHRONOUS_COPIES = ("dp2", "dp3", "dp3:ring")
CAUSES = {
    "held GIL": "held interpreter",
    "endless loop": "action",
    "lock": "action",
    "stopped process": "stopped process",
    "child process": "action",
    "silent pipe": "action",
    "blocked backward": "action",
    "blocking loader": "loader",
    "skipped collective": "skipped",
    "mismatched size": "mismatched size",
    "slow computing": "computing",
    "sleeping": "computing",
    "slow loader": "loader",
    "memory pressure": "memory",
    "slow link": "link",
    "NaN weight": "",
    "infinite weight": "",
    "spike": "",
    "flipped bit": "",
    "wrong update": "",
}
KINDS = {
    "hang": tuple(CAUSES)[:10],
    "straggler": ("slow computing", "sleeping", "slow loader", "memory pressure", "slow link"),
    "nan": ("NaN weight", "infinite weight", "spike"),
    "corruption": ("flipped bit", "wrong update"),
}


@dataclass(frozen=True)
class Planted:
    """A fault, the run that it is committed in, and what the doctor must say."""

    finding: str
    kind: str
    rank: int
    step: int
    plan: str
    bit: int = 20
    element: int = 5


@dataclass(frozen=True)
class Outcome:
    """The answer of the doctor, and what the run said."""

    ok: bool
    finding: dict[str, Any] | None
    err: str

    @property
    def seconds(self) -> float:
        """The seconds without a sign after which a hang was named."""
        return float((self.finding or {}).get("seconds", 0.0))


def generate(seed: int, counts: dict[str, int]) -> list[Planted]:
    """So many faults of each kind of finding; each kind of fault comes in turn."""
    chance = random.Random(seed)
    made = []
    for finding, count in counts.items():
        for number in range(count):
            kind = KINDS[finding][number % len(KINDS[finding])]
            plans = PLANS
            if kind in ("skipped collective", "mismatched size", "slow link"):
                plans = ("dp2", "dp3")
            elif kind == "spike":  # zero3 gathers the head later, tp cuts it into parts
                plans = tuple(plan for plan in PLANS if plan not in ("dp2:zero3", "tp2"))
            elif finding in ("straggler", "corruption"):
                plans = SYNCHRONOUS_COPIES
            plan = chance.choice(plans)
            rank = chance.randrange(size_of(plan))
            if kind == "spike":
                rank = with_head(plan, rank)
            step = chance.randint(4, 12)
            bit = chance.randrange(4, 24)
            expected = "spike" if kind == "spike" else finding
            made.append(Planted(expected, kind, rank, step, plan, bit, chance.randrange(64)))
    return made


def part_of(seed: int, kinds: Sequence[str], numbers: range) -> list[tuple[str, int, Planted]]:
    """The faults of a seed with these kinds and numbers, each with its kind and number."""
    faults = generate(seed, dict.fromkeys(KINDS, FAULTS_A_KIND))
    found = []
    for place, kind in enumerate(KINDS):
        own = faults[place * FAULTS_A_KIND : (place + 1) * FAULTS_A_KIND]
        if kind in kinds:
            found += [(kind, number, own[number]) for number in numbers]
    return found


def with_head(plan: str, rank: int) -> int:
    """The rank of the last stage, where the head lies, in the place of `rank` in its own."""
    from plait.plan import Plan

    ranks_a_stage = size_of(plan) // Plan.parse(plan).pp.size
    return size_of(plan) - ranks_a_stage + rank % ranks_a_stage


def size_of(plan: str) -> int:
    """The ranks of a plan."""
    from plait.plan import Plan

    return Plan.parse(plan).world_size


def commit(fault: Planted, folder: Path) -> Outcome:
    """Run it, and ask the doctor."""
    config = CONFIG
    if fault.finding != "corruption":  # a changed weight is one, whatever else it is
        config = config.replace("check_replicas_every = 2", "check_replicas_every = 0")
    (folder / "faulty.toml").write_text(config)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PLANTED": json.dumps(asdict(fault))}
    paths = [str(ROOT), str(ROOT / "src"), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "plait", "train", "faulty.toml", "--plan", fault.plan]
    with (folder / "err").open("w") as err:
        run = subprocess.Popen(
            [*command, "--out", "run"], cwd=folder, env=variables, stdout=err, stderr=err
        )
        _wait(run, fault, folder / "run")
    said = subprocess.run(
        [sys.executable, "-m", "plait", "doctor", "run", "--json"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    text = (folder / "err").read_text()
    findings = json.loads(said.stdout).get("findings", []) if said.stdout else []
    finding = next((one for one in findings if one["kind"] == fault.finding), None)
    return Outcome(is_right(fault, finding), finding, text + said.stderr)


def is_right(fault: Planted, finding: dict[str, Any] | None) -> bool:
    """Whether rank, step and cause are those of the fault."""
    if finding is None or finding["rank"] != fault.rank:
        return False
    late = {"nan": 0, "spike": 0, "corruption": RHYTHM}.get(fault.finding)
    if late is not None and not fault.step <= finding["step"] <= fault.step + late:
        return False
    return CAUSES[fault.kind] in finding["cause"]


def _wait(run: subprocess.Popen[bytes], fault: Planted, folder: Path) -> None:
    """Wait until the run has ended, or a straggler or a spike is named."""
    end = time.monotonic() + START_SECONDS
    while run.poll() is None and time.monotonic() < end:
        if (folder / "metrics.jsonl").exists():
            break
        time.sleep(0.05)
    end = time.monotonic() + LIMIT_SECONDS
    findings = folder / "doctor" / "findings.jsonl"
    while run.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
        named = findings.exists() and f'"kind": "{fault.finding}"' in findings.read_text()
        if named and fault.finding in ("straggler", "spike"):
            run.terminate()
            break
    if run.poll() is None and time.monotonic() >= end:
        run.kill()
    run.wait(timeout=30)


def main() -> int:
    """Commit the faults one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--from", type=int, default=0, dest="first", help="number in its kind")
    parser.add_argument("--count", type=int, default=FAULTS_A_KIND, help="of each kind")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    words = parser.parse_args()
    numbers = range(words.first, min(words.first + words.count, FAULTS_A_KIND))
    end = time.monotonic() + words.seconds
    right = 0
    committed = 0
    for kind, number, fault in part_of(words.seed, words.kind, numbers):
        if time.monotonic() > end:
            print(f"out of time; go on with --kind {kind} --from {number}")
            break
        with tempfile.TemporaryDirectory() as folder:
            outcome = commit(fault, Path(folder))
        committed += 1
        right += outcome.ok and not is_late(fault, outcome)
        print(line_of(number, fault, outcome), flush=True)
        if not outcome.ok:
            print(outcome.err[-1500:])
    print(f"{right} of {committed}")
    return 0 if right == committed else 1


def is_late(fault: Planted, outcome: Outcome) -> bool:
    """Whether a hang was named more than 2 s after its limit; on a busy machine it may be."""
    return fault.finding == "hang" and outcome.seconds > HANG_SECONDS + 2


def line_of(number: int, fault: Planted, outcome: Outcome) -> str:
    """The line of one fault in the table."""
    said = "nothing" if outcome.finding is None else outcome.finding["cause"]
    word = "WRONG"
    if outcome.ok:
        word = "LATE " if is_late(fault, outcome) else "right"
    place = f"{fault.finding:<11}{number:2} {fault.kind:<19}{fault.plan:<18}rank {fault.rank}"
    return f"{word}  {place}  {outcome.seconds:5.1f} s  {said}"


if __name__ == "__main__":
    sys.exit(main())
