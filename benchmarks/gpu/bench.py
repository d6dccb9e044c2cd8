"""One GPU against a loop by hand: tokens a second, peak memory, prediction, and equality.

    python -m benchmarks.gpu.bench [--seconds 500] [--device cuda|cpu]

Each model trains in bf16 with float32 masters twice: under plait, and in a compiled loop by hand.
They take turns, in processes of their own. Then follows what was predicted, and the CUDA code of
every strategy with ranks that share the device over Gloo, beside one rank. Without a GPU the script
says so and ends well; `--device cpu` tries the script itself on tiny models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.gpu.models import SUBJECTS
from benchmarks.machine import announce

SYSTEMS = ("plait", "by hand")
STRATEGIES = (
    *("dp2", "dp2:ring", "dp2:zero1", "dp2:zero2", "dp2:zero3", "tp2", "tp2:1d,sp"),
    *("tp4:2d", "pp2:1f1b mb2", "pp2:zbv mb4", "cp2:ring", "cp2:ulysses"),
)
TURN = "from benchmarks.gpu.turn import main; main()"
TURNS = 2


def turn(question: dict[str, object], limit_seconds: float) -> dict[str, object]:
    """What a process of its own answers; its error where it fails."""
    command = [sys.executable, "-c", TURN, json.dumps(question)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_seconds:.0f} s"}
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or ["no message"]
        return {"error": lines[-1]}
    answer: dict[str, object] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


def speed_table(device: str, deadline: float) -> None:
    """Tokens a second and peak memory, beside a loop by hand and the prediction."""
    print(
        "| model | system | tokens/s | / by hand | peak GB | / by hand | predicted step, memory |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for index, subject in enumerate(SUBJECTS):
        taken: dict[str, list[dict[str, object]]] = {name: [] for name in SYSTEMS}
        for _ in range(TURNS):
            for name in SYSTEMS:
                if time.monotonic() > deadline and taken[name]:
                    continue
                question = {"subject": index, "system": name, "device": device}
                taken[name].append(turn(question, max(60.0, deadline - time.monotonic())))
        for name in SYSTEMS:
            print(row(subject.title, name, taken), flush=True)


def row(title: str, name: str, taken: dict[str, list[dict[str, object]]]) -> str:
    """A line of the table, or what went wrong."""
    wrong = next((one["error"] for one in taken[name] if "error" in one), None)
    if wrong is not None:
        return f"| {title} | {name} | failed: {wrong} | | | | |"
    speed = _median(taken[name], "tokens_per_second")
    peak = _median(taken[name], "peak_bytes")
    hand = [one for one in taken["by hand"] if "error" not in one]
    of_speed = of_peak = ""
    if hand and name != "by hand":
        of_speed = f"{speed / _median(hand, 'tokens_per_second'):.3f}"
        of_peak = f"{peak / _median(hand, 'peak_bytes'):.3f}"
    predicted = str(taken[name][0].get("predicted", ""))
    return (
        f"| {title} | {name} | {speed:,.0f} | {of_speed} | {peak / 1e9:.2f} | {of_peak} "
        f"| {predicted} |"
    )


def _median(answers: Sequence[dict[str, object]], key: str) -> float:
    return median(float(str(one[key])) for one in answers)


def equality_table(device: str, deadline: float) -> None:
    """The code of every strategy, with ranks that share the device over Gloo, beside one rank."""
    print("\n| plan | largest relative difference of a parameter from one rank |")
    print("|---|---|", flush=True)
    for plan in STRATEGIES:
        left = deadline - time.monotonic()
        if left < 20:
            print(f"| {plan} | not run: no time left |")
            continue
        answer = turn({"plan": plan, "device": device}, left)
        found = answer.get("error") or f"{float(str(answer['difference'])):.1e}"
        print(f"| {plan} | {found} |", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(words)
    announce()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU at hand")
        return
    if arguments.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        print(f"device: {properties.name}, {properties.total_memory / 1e9:.0f} GB; one rank, NCCL")
    else:
        print("a trial of the script on tiny models: its numbers mean nothing")
    began = time.monotonic()
    speed_table(arguments.device, began + 0.7 * arguments.seconds)
    equality_table(arguments.device, began + arguments.seconds)


if __name__ == "__main__":
    main()
