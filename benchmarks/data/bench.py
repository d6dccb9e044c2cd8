"""Batches a second of a set of tokens: plait's loader, and torch's over the library `datasets`.

Both read the same documents, made here, as windows of the same length in a random order. The
library's set holds the windows as rows of Arrow, which is the way its users store them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.machine import announce
from plait import datasets
from plait.datasets import Loader

SEQ_LEN = 512
BATCH = 16


def write_rows(path: Path, num_rows: int) -> None:
    """JSON lines of letters, some hundred a row."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            text = "".join(rng.choices("abcdefgh ", k=rng.randint(50, 2000)))
            file.write(json.dumps({"text": text}) + "\n")


def batches_a_second(batches: Iterator[Any], count: int) -> float:
    """The rate after a first batch, which starts what reads ahead."""
    next(batches)
    began = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return count / (time.perf_counter() - began)


def library_loader(samples: Any, workers: int) -> Iterator[Any]:
    """The same windows as rows of the library `datasets`, shuffled by torch."""
    import datasets as library

    rows = library.Dataset.from_dict({"input_ids": [samples[n][0] for n in range(len(samples))]})
    loader: DataLoader[Any] = DataLoader(
        rows.with_format("torch"), batch_size=BATCH, shuffle=True, num_workers=workers
    )
    while True:
        yield from loader


def main() -> None:
    """Print a line for each loader and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batches", type=int, default=400)
    arguments = parser.parse_args()
    announce()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, arguments.rows)
        section = {"name": "files", "files": [str(path)], "seq_len": SEQ_LEN, "cache": folder}
        samples: Any = datasets.make(section, {"name": "llama", "vocab_size": 256})
        for workers in (0, 2):
            own = batches_a_second(Loader(samples, BATCH, workers=workers), arguments.batches)
            theirs = batches_a_second(library_loader(samples, workers), arguments.batches)
            print(f"{workers} workers: plait {own:,.0f} batches/s, datasets {theirs:,.0f}")


if __name__ == "__main__":
    main()
