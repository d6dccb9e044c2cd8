"""One GPU in one call: speed and memory beside loops by hand, adapters, and the planner's numbers.

    python -m benchmarks.gpu --out FOLDER [--seconds 230] [--parts speed,lora,...] [--device cpu]

| part | what it prints |
|---|---|
| speed | GPT-2 124M, Llama 1B and 3B in bf16: tokens/s, memory, TFLOP/s, predicted over measured |
| lora | Llama 8B with adapters of rank 16, TFLOP/s by the formula of NeMo Automodel |
| components | products, attention, experts, norm, copies and AdamW, beside what is predicted |
| waits | where a step waits for the device |
| reads | steps that the device decides on beside those that the host decides on |
| equality | the code of every strategy beside one rank, where that script is here |
| probe | what `plait probe --json` measures |

Each model, each system of `lora` and each other part has a process of its own. All are started at
once, and compile at once with few layers. Then they measure, one after the other: a part that fails
prints one line, and the next one begins. Tables come as they are ready; FOLDER/results.jsonl has
every number, and FOLDER/log-PART.txt what else a part said. Without a GPU the script says so and
ends well; `--device cpu` tries the script itself on tiny models.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.children import Child
from benchmarks.gpu.models import SUBJECTS
from benchmarks.gpu.record import RUN, Record
from benchmarks.machine import announce, machine_line

PARTS = ("speed", "lora", "components", "waits", "reads", "equality", "probe")
WEIGHTS = {
    "speed": 25,
    "lora": 14,
    "components": 20,
    "waits": 1,
    "reads": 10,
    "equality": 40,
    "probe": 40,
}
"""The part of what is left of the time that a process may take for a second turn."""
LORA_SYSTEMS = 3
READY_SECONDS = 90.0
"""How long measuring waits for the slowest compilation."""


def names_of(parts: Sequence[str]) -> list[str]:
    """The processes of the parts, in the order in which they measure."""
    several = {
        "speed": [f"speed-{index}" for index in range(len(SUBJECTS))],
        "lora": [f"lora-{index}" for index in range(LORA_SYSTEMS)],
    }
    return [name for part in parts for name in several.get(part, [part])]


def run_all(names: Sequence[str], device: str, folder: Path, seconds: float) -> None:
    """Start the processes, let them compile together, and measure one after the other."""
    began = time.monotonic()
    children = [Child(name, device, folder) for name in names]
    try:
        if device == "cuda":
            for child in children:
                child.start()
            limit = began + min(READY_SECONDS, 0.45 * seconds)
            while time.monotonic() < limit and not all(child.is_ready() for child in children):
                time.sleep(0.1)
            print(f"started and compiled in {time.monotonic() - began:.0f} s", flush=True)
        for index, child in enumerate(children):
            left = began + seconds - time.monotonic()
            later = children[index + 1 :]
            share = WEIGHTS[child.part] / sum(WEIGHTS[one.part] for one in children[index:])
            if left < 8:
                print(f"\n{child.name}: not run, no time is left", flush=True)
                continue
            child.start()
            asked = time.monotonic()
            child.measure(left * share, max(8.0, left - 5.0 * len(later)))
            print(f"({child.name}: {time.monotonic() - asked:.0f} s)", flush=True)
    finally:
        for child in children:
            child.end()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args(words)
    parts = arguments.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    announce()
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            print("no GPU at hand")
            return
        properties = torch.cuda.get_device_properties(0)
        card = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB"
        print(f"device: {card}; CUDA {torch.version.cuda}; one rank, NCCL", flush=True)
    else:
        card = "cpu"
        print("a trial of the script on tiny models: its numbers mean nothing", flush=True)
    os.environ[RUN] = str(time.time())
    Record(folder, "machine").keep(card=card, machine=machine_line(), at=time.time())
    run_all(names_of(parts), arguments.device, folder, arguments.seconds)


if __name__ == "__main__":
    main()
