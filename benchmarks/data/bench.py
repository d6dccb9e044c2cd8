"""Batches a second of one set of tokens: plait's loader, torch's over `datasets`, and MosaicML's.

    pip install "plait[data]" mosaicml-streaming
    python -m benchmarks.data.bench

All read the same samples, each in its own format and order. Loaders of a number of workers live in
one process and take turns. First, one epoch of each proves that the samples are the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Final

import torch

from benchmarks.data.systems import SYSTEMS, TokenBatches, write_formats
from benchmarks.machine import announce, versions_of
from benchmarks.spread import quartile_text
from plait import datasets
from plait.datasets.sample_set import SampleSet

SEQ_LEN: Final = 512
BATCH: Final = 16
SETTLE_SECONDS: Final = 0.3
"""Threads of the loader before read on for a while; they would take the next one's processor."""
WARM: Final = 16
"""Batches before each timed stretch: those that were read ahead while others had their turn."""


def write_rows(path: Path, num_rows: int) -> None:
    """JSON lines of letters, some hundred a row."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            text = "".join(rng.choices("abcdefgh ", k=rng.randint(50, 2000)))
            file.write(json.dumps({"text": text}) + "\n")


def rate(batches: TokenBatches, count: int) -> float:
    """Batches a second over so many, behind a few that are not counted."""
    for _ in islice(batches, WARM):
        pass
    began = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return count / (time.perf_counter() - began)


def fingerprint(batches: TokenBatches, num_samples: int) -> int:
    """A number that follows from the samples of an epoch, whatever their order."""
    keys = torch.randint(1 << 40, (SEQ_LEN, 2), generator=torch.Generator().manual_seed(0))
    total = torch.zeros((), dtype=torch.int64)
    seen = 0
    for tokens, labels in batches:
        hashed = (tokens * keys[:, 0] + labels * keys[:, 1]).sum(1)
        total += (hashed * hashed).sum()  # a sum alone would not see tokens that change places
        seen += len(tokens)
        if seen >= num_samples:
            break
    if seen != num_samples:
        raise SystemExit(f"an epoch of {num_samples} samples gave {seen}")
    return int(total)


def check_equal(samples: SampleSet, folder: Path) -> None:
    """Stop unless an epoch of every loader has the same samples."""
    found = {
        name: fingerprint(start(samples, folder, BATCH, 0), len(samples))
        for name, start in SYSTEMS.items()
    }
    if len(set(found.values())) > 1:
        raise SystemExit(f"the loaders give other samples: {found}")
    print(f"{len(samples):,} samples of {SEQ_LEN} + 1 tokens, the same from every loader\n")


def compare(samples: SampleSet, folder: Path, workers: int, rounds: int, count: int) -> None:
    """Print a line for each loader: its quartiles, and plait's rate as multiples of its own."""
    running = {name: start(samples, folder, BATCH, workers) for name, start in SYSTEMS.items()}
    rates: dict[str, list[float]] = {name: [] for name in running}
    for batches in running.values():
        next(batches)
    for _ in range(rounds):
        for name, batches in running.items():
            time.sleep(SETTLE_SECONDS)
            rates[name].append(rate(batches, count))
    for name, measured in rates.items():
        own = zip(rates["plait"], measured, strict=True)
        print(
            f"| {workers} | {name} | {quartile_text(measured, ',.0f')} | "
            f"{quartile_text([ours / theirs for ours, theirs in own], '.2f')} |",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batches", type=int, default=100, help="of each turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each loader")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    announce()
    print(versions_of("torch", "datasets", "pyarrow", "mosaicml-streaming", "numpy"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.jsonl"
        write_rows(path, arguments.rows)
        section = {"name": "files", "files": [str(path)], "seq_len": SEQ_LEN, "cache": name}
        samples = datasets.make(section, {"name": "llama", "vocab_size": 256})
        write_formats(samples, folder, SEQ_LEN)
        check_equal(samples, folder)
        print("| workers | loader | batches/s | plait's rate to it |\n|---|---|---|---|")
        for workers in arguments.workers:
            compare(samples, folder, workers, arguments.rounds, arguments.batches)


if __name__ == "__main__":
    main()
