"""The share of a rank in the batches of a loader, and the example that a model is cut by.

The batches stay those of one device. A rank takes its contiguous part of each, so the ranks' parts
join to the loader's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from plait.batch_trees import (
    agreed_size,
    cut_samples,
    held_leaves,
    leaves_of,
    num_rows,
    refuse_undivided,
    sizes_of,
)
from plait.comm import World
from plait.datasets import Loader
from plait.datasets.loader import bounds
from plait.engine.batch import inputs_and_targets
from plait.errors import DataError
from plait.values import PyTree

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts of tensors whose rows no plan divides."""


def example_of(batch: PyTree, *, whole: bool = False) -> PyTree:
    """The inputs of one sample of a batch; a sample of zeros where this rank has none.

    With `whole` it is the inputs of the batch, where its samples cannot be told apart. Errors:
    `DataError` for such a batch without it.
    """
    pair = inputs_and_targets(batch)
    if whole and _is_undivided(pair):
        return pair[0]
    agreed_size(held_leaves(pair))
    return cut_samples(pair, _first_sample, lambda _: slice(1))[0]


def _is_undivided(batch: PyTree) -> bool:
    """Whether tensors of a batch differ in their first dims, or are sparse, as of a graph."""
    leaves = held_leaves(batch)
    sparse = any(isinstance(leaf, Tensor) and leaf.layout in SPARSE for leaf, _ in leaves)
    return sparse or len(set(sizes_of(leaves))) > 1


def _first_sample(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.jagged and tensor.size(0):
        return torch.nested.as_nested_tensor([tensor[0]], layout=tensor.layout)
    refuse_undivided(tensor, 0)
    if tensor.shape[0] == 0:
        return tensor.new_zeros((1, *tensor.shape[1:]))
    return tensor[:1]


def first_batch(loader: Iterable[PyTree]) -> PyTree:
    """A batch that does not move the loader on.

    Raises:
        DataError: a loader that can be read only once.
    """
    if isinstance(loader, DataLoader) and _is_indexed(loader):
        return loader.collate_fn([loader.dataset[0]])
    if isinstance(loader, Loader):
        return next(iter(Loader(loader.dataset, 1)))
    if isinstance(loader, Iterator):
        raise DataError(
            f"a {type(loader).__name__} is read once, and its first batch shows where the model is "
            "cut; give a loader that can be read again, or call engine.step with its batches"
        )
    return next(iter(loader))


def _is_indexed(loader: DataLoader[PyTree]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def share(loader: Iterable[PyTree], world: World, shares: Sequence[int] = ()) -> Iterable[PyTree]:
    """The batches of a loader, of each this rank's part: `loader` yields whole global batches.

    `shares`: whole numbers in whose ratio ranks share a batch; equal by default.
    """
    rank, size = world.worker
    _refuse_parts(loader)
    shares = shares or (1,) * size
    if isinstance(loader, Loader):
        if loader.dp_size != 1:
            return loader
        part_of_rank = Loader(
            loader.dataset,
            loader.global_batch,
            dp_size=size,
            dp_rank=rank,
            seed=loader.seed,
            shares=shares,
            workers=loader.workers,
        )
        part_of_rank.load_state_dict(loader.state_dict())
        return part_of_rank
    if isinstance(loader, DataLoader) and _is_indexed(loader):
        is_alone = size == 1 or loader.collate_fn in (default_collate, default_convert)
        kind = _IndexShare if is_alone else _CollatedShare
        return kind(loader, world, shares)
    return _BatchShare(loader, world, shares)


def _refuse_parts(loader: Iterable[PyTree]) -> None:
    """Raise `DataError` for a loader whose sampler gives each rank a part of the samples."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for one in (sampler, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        replicas = getattr(one, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise DataError(
                f"the {type(one).__name__} of the loader gives each of {replicas} ranks a part of "
                "the samples, of which engine.prepare would give each a part again; leave the "
                "sampler out, with the global batch as batch_size and shuffle=True, or give "
                "engine.step the loader's batches without engine.prepare"
            )


def _refuse_mixed(batch: PyTree) -> None:
    """Raise `DataError` for first dims that differ, with the numbers of what a loader gave."""
    leaves = held_leaves(batch)
    if len(set(sizes_of(leaves))) > 1:
        agreed_size(leaves)


class _BatchShare:
    """Every rank reads whole batches and keeps its samples of each."""

    def __init__(self, loader: Iterable[PyTree], world: World, shares: Sequence[int]) -> None:
        self._loader = loader
        self._world = world
        self._shares = shares

    def __len__(self) -> int:
        length: int = len(self._loader)  # type: ignore[arg-type]  # an error of the loader's own
        return length

    def __iter__(self) -> Iterator[PyTree]:
        _agree_on_order(self._world)
        place = partial(_place, self._shares, self._world.worker[0])
        for batch in self._loader:
            if self._world.worker[1] > 1:
                _refuse_mixed(batch)
                rows = num_rows(batch) or 0
                for leaf in leaves_of(batch):
                    refuse_undivided(leaf, rows)
            yield cut_samples(batch, partial(_part, place), place)


class _IndexShare:
    """Every rank reads only its own samples of a `DataLoader` whose batches are lists of
    indices.
    """

    def __init__(self, loader: DataLoader[PyTree], world: World, shares: Sequence[int]) -> None:
        self._world = world
        self._sampler = _SharedSampler(loader.batch_sampler, shares, world.worker[0])
        self._loader = _like(loader, self._sampler, loader.collate_fn)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[PyTree]:
        _agree_on_order(self._world)
        self._sampler.sizes.clear()
        for batch in self._loader:
            size = self._sampler.sizes.popleft()
            if self._world.worker[1] > 1:
                _refuse_mixed(batch)
            yield cut_samples(batch, partial(_first, size), slice if size else _nothing)


class _CollatedShare:
    """Every rank reads whole batches of a `DataLoader` with a collate function of the user's own.

    Such a function may look at the whole batch, as one that pads, mixes or normalises it does.
    """

    def __init__(self, loader: DataLoader[PyTree], world: World, shares: Sequence[int]) -> None:
        self._world = world
        collate = PartOfCollated(loader.collate_fn, shares, world.worker[0])
        self._loader = _like(loader, loader.batch_sampler, collate)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[PyTree]:
        _agree_on_order(self._world)
        for batch in self._loader:
            _refuse_mixed(batch)
            yield batch


class PartOfCollated:
    """A collate function that gives one rank's rows of what another makes of the whole batch.

    Documents packed into one row have no row for each sample. There the other function is given
    this rank's samples alone.
    """

    def __init__(
        self, collate: Callable[[list[PyTree]], PyTree], shares: Sequence[int], rank: int
    ) -> None:
        self._collate = collate
        self._shares = shares
        self._rank = rank

    def __call__(self, samples: list[PyTree]) -> PyTree:
        """This rank's part of a batch; its tensors may be empty."""
        place = _place(self._shares, self._rank, len(samples))
        batch = self._collate(samples)
        if _has_rows(batch, len(samples)):
            return cut_samples(batch, lambda tensor: tensor[place], lambda _: place)
        mine = samples[place]
        batch = self._collate(mine or samples[:1])
        return batch if mine else cut_samples(batch, partial(_first, 0), _nothing)


def _has_rows(batch: PyTree, num_samples: int) -> bool:
    """Whether the tensors of a batch have a row for each sample, so that it can be cut."""
    if set(sizes_of(held_leaves(batch))) != {num_samples}:
        return False
    try:
        for leaf in leaves_of(batch):
            refuse_undivided(leaf, num_samples)
    except DataError:
        return False
    return True


def _like(
    loader: DataLoader[PyTree], batches: Any, collate: Callable[[list[PyTree]], PyTree]
) -> DataLoader[PyTree]:
    """A loader with another batch sampler and collate function, and all else of `loader`."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _SharedSampler:
    """A rank's indices of each batch; one index stands in where it has none.

    Attributes:
        sizes: of the batches that were drawn and not yet yielded, this rank's samples.
    """

    def __init__(self, sampler: Any, shares: Sequence[int], rank: int) -> None:
        self._sampler = sampler
        self._shares = shares
        self._rank = rank
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            indices = list(batch)
            mine = indices[slice(*bounds(len(indices), self._shares, self._rank))]
            self.sizes.append(len(mine))
            yield mine or indices[:1]


def _first(size: int, tensor: Tensor) -> Tensor:
    """The rows of this rank; a rank without samples has read one in their place."""
    return tensor if size else tensor[:0]


def _nothing(num_samples: int) -> slice:
    return slice(0)


def _place(shares: Sequence[int], rank: int, num_samples: int) -> slice:
    return slice(*bounds(num_samples, shares, rank))


def _part(place: Callable[[int], slice], tensor: Tensor) -> Tensor:
    rows = place(tensor.size(0))
    return tensor if rows == slice(0, tensor.size(0)) else tensor[rows]


def _agree_on_order(world: World) -> None:
    """Begin an epoch from the random state of the first rank, by which samplers shuffle.
    Collective.
    """
    if world.membership is not None or world.size == 1:
        return
    own = torch.get_rng_state()
    first = world.axis("world").gather_objects(own.numpy().tobytes())[0]
    torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))
