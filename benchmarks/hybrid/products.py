"""What it spares that products add their weights' gradients where these belong: `python -m benchmarks.hybrid.products`.

Two engines of one process take turns, one of which leaves gradients to autograd, which makes a tensor of each and copies or
adds it; so what else the machine does meets both. Processor time of a step, median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

from benchmarks.hybrid.scaling import SUBJECT
from plait import data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print("| plan | copied or added ms | added by the product ms |\n|---|---|---|")
    for text in ("mb1", "mb2", "mb4", "mb8"):
        world = SUBJECT.join(text)
        with patch.object(data, "POOLED", frozenset(data.STRATEGIES)):
            copied = SUBJECT.engine(text, world)
        engines, batch = (copied, SUBJECT.engine(text, world)), SUBJECT.share(world)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(given.rounds):
            for engine, found in zip(engines, seconds, strict=True):
                began = time.process_time()
                engine.step(batch, trace=False)
                found.append(time.process_time() - began)
        world.close()
        print(f"| {text} | " + " | ".join(f"{1e3 * statistics.median(found):.0f}" for found in seconds) + " |")


if __name__ == "__main__":
    main()
