"""Partitions of a data set over clients, even and skewed: pure functions of labels and a seed.

T. Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification (2019) for Dirichlet. B. McMahan et al., Communication-Efficient Learning of Deep
Networks from Decentralized Data (AISTATS 2017) for shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from plait.errors import DataError, nearest

Parts = list[list[int]]


def iid(labels: Sequence[int], num_clients: int, rng: np.random.Generator, _: float) -> Parts:
    """Equal random parts."""
    return _sorted(np.array_split(rng.permutation(len(labels)), num_clients))


def dirichlet(
    labels: Sequence[int], num_clients: int, rng: np.random.Generator, alpha: float
) -> Parts:
    """Each label is dealt out by shares drawn from Dirichlet(alpha): the smaller alpha, the fewer
    labels a client has.
    """
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    array = np.asarray(labels)
    for label in np.unique(array):
        indices = rng.permutation(np.flatnonzero(array == label))
        shares = rng.dirichlet([alpha] * num_clients)
        cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(int)
        for part, piece in zip(parts, np.split(indices, cuts), strict=True):
            part.extend(int(index) for index in piece)
    return _sorted(_none_empty(parts))


def shards(
    labels: Sequence[int], num_clients: int, rng: np.random.Generator, per_client: float
) -> Parts:
    """Sorted by label and cut into `per_client` shards a client: most clients see that many
    labels. Raises `DataError` for fewer samples than shards.
    """
    order = np.argsort(np.asarray(labels), kind="stable")
    count = max(1, int(per_client))
    if len(labels) < num_clients * count:
        raise DataError(
            f"{len(labels)} samples are too few for {num_clients} clients x {count} shards = "
            f"{num_clients * count} shards; use fewer clients, or federated.shards_per_client "
            f"{max(1, len(labels) // num_clients)} or less"
        )
    pieces = np.array_split(order, num_clients * count)
    dealt = rng.permutation(len(pieces)).reshape(num_clients, count)
    return _sorted([np.concatenate([pieces[k] for k in of_client]) for of_client in dealt])


def quantity(
    labels: Sequence[int], num_clients: int, rng: np.random.Generator, alpha: float
) -> Parts:
    """Random parts of very different sizes: shares drawn from Dirichlet(alpha), labels alike."""
    indices = rng.permutation(len(labels))
    cuts = np.round(np.cumsum(rng.dirichlet([alpha] * num_clients))[:-1] * len(labels)).astype(int)
    return _sorted(_none_empty([list(map(int, piece)) for piece in np.split(indices, cuts)]))


PARTITIONS: Final[dict[str, Callable[[Sequence[int], int, np.random.Generator, float], Parts]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "quantity": quantity,
}


def partition(
    name: str, labels: Sequence[int], num_clients: int, seed: int, parameter: float
) -> Parts:
    """The indices of each client, ascending. `parameter` is alpha, or the shards of a client.

    Raises `DataError` for an unknown name and for fewer samples than clients.
    """
    if name not in PARTITIONS:
        raise DataError(f"there is no partition '{name}'; {nearest(name, PARTITIONS)}")
    if len(labels) < num_clients:
        raise DataError(f"{len(labels)} samples are too few for {num_clients} clients")
    return PARTITIONS[name](labels, num_clients, np.random.default_rng(seed), parameter)


def _none_empty(parts: Parts) -> Parts:
    """A client without a sample gets one of the largest part. It can then take part, and weighs
    next to nothing.
    """
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


def _sorted(parts: Sequence[Any]) -> Parts:
    return [sorted(int(index) for index in part) for part in parts]
