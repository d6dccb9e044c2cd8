"""Ranks that write down which samples they read: the other half of `tests.fault.sequences`.

The tokens of a sample say its source and its number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from plait.config import Config
from plait.run import kept, loop
from plait.run.assemble import make_loader
from plait.run.job import TrainingRun

STEPS: Final = 12
NUM_SAMPLES: Final = 50
RUN: Final = "run"
PLACE: Final = "place.json"
MODEL: Final = """
[model]
name = "gpt"
num_hidden_layers = 2
hidden_size = 8
num_attention_heads = 2
intermediate_size = 16
vocab_size = 16
[train]
steps = 12
global_batch = 6
optimizer = "sgd"
lr = 0.1
[plan]
text = "dp1"
[recovery]
restarts = 0
replan = "never"
[data]
seq_len = 4
"""
SOURCES: Final = {
    "indexable": 'python = "tests.fault.reading:in_memory"',
    "keyed": 'python = "tests.fault.reading:KeyedNumbers"',
    "streamed": 'name = "files"\nfiles = ["a-*.jsonl"]\ncache = "kept"',
    "packed": 'name = "files"\nfiles = ["documents.jsonl"]\ncache = "kept"\npacking = true',
    "mixture": """cache = "kept"
from_step = [0, 5]
[[data.mixture]]
name = "files"
files = ["a-*.jsonl"]
weight = [3, 1]
[[data.mixture]]
name = "files"
files = ["b.jsonl"]
weight = [1, 1]""",
}

LIBRARY: Final = {
    "iterable": 'name = "hf"\npython = "tests.fault.reading:stream"\ncache = "kept"',
}
"""Sources that need the library `datasets`."""


def digits(source: int, number: int) -> list[int]:
    """The tokens that say which sample of which source they are."""
    return [source, number >> 8 & 15, number >> 4 & 15, number & 15]


def pair(number: int) -> tuple[Tensor, Tensor]:
    """A sample of an indexable set."""
    return torch.tensor(digits(0, number)), torch.tensor([*digits(0, number)[1:], 0])


def in_memory() -> list[tuple[Tensor, Tensor]]:
    """A list, which is read in a shuffled order."""
    return [pair(number) for number in range(NUM_SAMPLES)]


class KeyedNumbers:
    """A set that asks for the keyed permutation."""

    keyed_order = True

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return pair(index)


def rows_of(parts: list[range]) -> Iterator[dict[str, list[int]]]:
    """Rows of tokens, from parts that the library may share out."""
    for part in parts:
        for number in part:
            yield {"input_ids": digits(0, number)}


def stream() -> Any:
    """An iterable of the library, of two shards, whose rows pass through a step."""
    import datasets

    parts = {"parts": [range(21), range(21, NUM_SAMPLES + 1)]}
    made = datasets.IterableDataset.from_generator(rows_of, gen_kwargs=parts)
    return made.map(lambda row: {"length": len(row["input_ids"])})


def write_sources(folder: Path) -> None:
    """The files that the sources name: rows of tokens."""
    streams = {"a-1": (0, 0, 21), "a-2": (0, 21, NUM_SAMPLES + 1), "b": (1, 0, 18)}
    for name, (source, first, last) in streams.items():
        rows = [{"input_ids": digits(source, number)} for number in range(first, last)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = [{"input_ids": [*digits(0, number), 0]} for number in range(NUM_SAMPLES)]
    (folder / "documents.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, keys in {**SOURCES, **LIBRARY}.items():
        placed = keys.replace('"kept"', f'"{folder / "kept"}"')
        (folder / f"{name}.toml").write_text(f"{MODEL}{placed}\n")


class Recorder:
    """A loader that writes down what it gives."""

    def __init__(self, loader: Any, engine: Any, folder: Path) -> None:
        self._loader = loader
        self._engine = engine
        name = f"{(folder / 'stretch').read_text()}-{os.getpid()}.jsonl"
        self._file = (folder / "read" / name).open("a", buffering=1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader)
        inputs = batch[0]
        tokens = inputs[0] if isinstance(inputs, tuple) else inputs
        samples = [int("".join(f"{digit:x}" for digit in row), 16) for row in tokens.tolist()]
        place = [self._engine.step_index + 1, self._loader.dp_rank, self._loader.dp_size]
        self._file.write(json.dumps([*place, samples]) + "\n")
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def read_alone(
    rank: int,
    size: int,
    config: Path,
    folder: Path,
    workers: int,
    steps: int | None,
    every: int,
    barrier: Any,
) -> None:
    """A rank that reads batches. All save their place together, by the first one's file."""
    loaded = Config.load(config, [f"data.workers={workers}"])
    loader = make_loader(loaded, rank, size)
    place = folder / PLACE
    step = 0
    if place.exists():
        step, state = json.loads(place.read_text())
        loader.load_state_dict(state, step)
    last = STEPS if steps is None else min(STEPS, step + steps)
    counted = SimpleNamespace(step_index=step)
    batches = Recorder(loader, counted, folder)
    while counted.step_index < last:
        next(batches)
        counted.step_index += 1
        time.sleep(0.005)
        if counted.step_index % every and counted.step_index < last:
            continue
        barrier.wait()
        if rank == 0:
            part = place.with_suffix(".part")
            part.write_text(json.dumps([counted.step_index, loader.state_dict()]))
            part.replace(place)


plain_run = kept.run


def recorded(seat: Any, job: TrainingRun) -> None:
    """A rank of a run, whose batches are written down beside the run's folder."""
    assert job.folder is not None
    folder = job.folder.parent
    fit = loop.fit

    def fit_recorded(engine: Any, loader: Any, *args: Any, **options: Any) -> Any:
        return fit(engine, Recorder(loader, engine, folder), *args, **options)

    loop.fit = fit_recorded
    plain_run(seat, job)
