"""The deal of one data set: what the server holds out, and each client's samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.config import Federated
from plait.datasets.sample_set import SampleSet
from plait.errors import DataError
from plait.outer.federated.partitions import partition

HELD_OUT = 0.2  # of all samples, at the server; and of each client's, for its own test


@dataclass(frozen=True)
class Split:
    """Indices: the server's test samples, and each client's for training and for its own test."""

    test: list[int]
    train: list[list[int]]
    own_test: list[list[int]]


def split(dataset: SampleSet, section: Federated, seed: int) -> Split:
    """Samples of every client. A pure function: every process computes an equal split."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    held = int(HELD_OUT * len(order))
    test = sorted(order[:held])
    rest = sorted(order[held:])
    parts = (
        [order] * section.clients
        if section.partition == "own"
        else _dealt(dataset, rest, section, seed)
    )
    test = sorted(order) if section.partition == "own" else test
    train = []
    own_tests = []
    for client, part in enumerate(parts):
        mixed = torch.randperm(
            len(part), generator=torch.Generator().manual_seed(seed + 1 + client)
        ).tolist()
        num_own = int(HELD_OUT * len(part))
        own_tests.append(sorted(part[k] for k in mixed[:num_own]) or part)
        train.append(sorted(part[k] for k in mixed[num_own:]))
    return Split(test, train, own_tests)


def _dealt(
    dataset: SampleSet, indices: list[int], section: Federated, seed: int
) -> list[list[int]]:
    skewed = section.partition in ("dirichlet", "shards")
    labels = [_label(dataset, index) if skewed else 0 for index in indices]
    parameter = section.shards_per_client if section.partition == "shards" else section.alpha
    parts = partition(section.partition, labels, section.clients, seed, parameter)
    return [[indices[k] for k in part] for part in parts]


def _label(dataset: SampleSet, index: int) -> int:
    """The label that a skewed partition sorts by: the target, or the last token of a text.

    Raises:
        DataError: targets that are no whole numbers.
    """
    value = dataset[index][1]
    try:
        target = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as failure:  # a dict, a text, uneven lists
        raise _no_label(index, f"a {type(value).__name__}") from failure
    if target.is_floating_point() or not target.numel():
        raise _no_label(index, f"{target.dtype} of shape {tuple(target.shape)}")
    return int(target.reshape(-1)[-1])


def _no_label(index: int, what: str) -> DataError:
    return DataError(
        f"federated.partition needs labels, and the target of sample {index} is {what}; use "
        "partition 'iid' or 'quantity'"
    )
