"""The order of samples: a keyed permutation of any size, the same whatever happens to a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.datasets import Loader
from plait.datasets.documents import DocumentFacts, Documents
from plait.datasets.hashing import seed_of
from plait.datasets.mixture import SampleMixture
from plait.datasets.order import LISTED, STRETCH, Keyed, Shuffled, order_of
from plait.datasets.permutation import KeyedPermutation
from plait.datasets.sample_set import SampleSet
from plait.datasets.sequences import TokenStream
from plait.errors import DataError

BILLION = 10**9


class Numbers:
    """Samples that are their own numbers, read by a keyed permutation."""

    keyed_order = True
    content = 7

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices, indices


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 1025])
def test_a_permutation_of_any_size(size: int) -> None:
    orders = [KeyedPermutation(size, seed)(torch.arange(size)).tolist() for seed in range(3)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 5:
        assert len({tuple(order) for order in orders}) == 3
        assert orders[0] != list(range(size))
    assert KeyedPermutation(size, 0)(torch.tensor([size - 1])).tolist() == orders[0][-1:]


def test_a_permutation_is_even() -> None:
    """Every sample is as likely at every place: chi-squared of 6 places over many seeds."""
    counts = torch.zeros(6, 6)
    num_seeds = 300
    for seed in range(num_seeds):
        counts[torch.arange(6), KeyedPermutation(6, seed)(torch.arange(6))] += 1
    expected = num_seeds / 6
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # 25 degrees of freedom


def test_a_place_far_away_needs_no_scan() -> None:
    size = 3_000_000_000_000
    order = Keyed(size, 5)
    found = order.at(4, 10**12, 10**12 + 64)
    assert len(set(found.tolist())) == 64
    assert int(found.max()) < size
    loader = Loader(Numbers(size), 64, seed=5)
    loader.skip(10**9)
    assert torch.equal(next(loader)[0], order.at(0, 64 * 10**9, 64 * 10**9 + 64))


@pytest.mark.parametrize("size", [5, STRETCH, 3 * STRETCH + 7])
def test_ranges_are_cut_from_stretches(size: int) -> None:
    order = Keyed(size, 5)
    rng = random.Random(size)
    for _ in range(60):
        epoch = rng.randrange(2)
        start = rng.randrange(size)
        stop = min(size, start + rng.choice([1, 16, STRETCH, 2 * STRETCH]))
        whole = KeyedPermutation(size, seed_of(5, epoch))
        assert torch.equal(order.at(epoch, start, stop), whole(torch.arange(start, stop)))


def test_a_stretch_is_permuted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    permuted: list[int] = []
    compute = KeyedPermutation.__call__

    def counted(self: KeyedPermutation, places: Tensor) -> Tensor:
        permuted.append(len(places))
        return compute(self, places)

    monkeypatch.setattr(KeyedPermutation, "__call__", counted)
    loader = Loader(Numbers(10 * STRETCH), 16)
    for _ in range(2 * STRETCH // 16):
        next(loader)
    assert permuted == [STRETCH, STRETCH]


class Listed(Numbers):
    """A set that asks for no order."""

    keyed_order = False


def indexable(folder: Path) -> Listed:
    return Listed(3 * BILLION)


def streamed(folder: Path) -> TokenStream:
    """A file of three thousand million tokens, which is all holes."""
    path = folder / "tokens.bin"
    num_tokens = 3 * BILLION + 1
    with path.open("wb") as file:
        file.truncate(num_tokens)
    tokens = np.memmap(path, dtype=np.uint8, mode="r")
    return TokenStream(Documents(tokens, np.array([num_tokens]), None, DocumentFacts(0, 7)), 1)


def mixed(folder: Path) -> SampleMixture:
    sets = [Numbers(3 * BILLION), Numbers(BILLION), Numbers(77)]
    return SampleMixture(sets, [[3, 1, 1], [1, 1, 0]], [0, BILLION // 2])


@pytest.mark.parametrize("make", [indexable, streamed, mixed])
def test_a_run_resumes_at_sample_a_thousand_million(
    make: Callable[[Path], SampleSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes a few stretches of places, not those before."""
    permuted: list[int] = []
    compute = KeyedPermutation.__call__

    def counted(self: KeyedPermutation, places: Tensor) -> Tensor:
        permuted.append(len(places))
        return compute(self, places)

    monkeypatch.setattr(KeyedPermutation, "__call__", counted)
    dataset = make(tmp_path)
    ranks = [Loader(dataset, 64, dp_size=2, dp_rank=rank, seed=5) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict({**loader.state_dict(), "position": BILLION})
        inputs, _ = next(loader)
        assert len(inputs) == 32
        assert loader.state_dict()["position"] == BILLION + 64
    assert sum(permuted) <= 12 * STRETCH


def test_a_large_set_is_permuted_by_a_key_and_a_small_one_listed() -> None:
    assert isinstance(order_of(Listed(LISTED), 0), Shuffled)
    assert isinstance(order_of(Listed(LISTED + 1), 0), Keyed)


def steps_of(rng: random.Random, num_samples: int, seed: int) -> Iterator[list[int]]:
    """Global batches of a run that is killed, resumed and moved to other numbers of ranks."""
    data = Numbers(num_samples)
    state: dict[str, int] | None = None
    done = 0
    while True:
        size = rng.choice([1, 2, 3, 5, 8])
        ranks = [Loader(data, 6, dp_size=size, dp_rank=rank, seed=seed) for rank in range(size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state, done)
        saved_at = rng.randint(0, 4)
        lost = rng.randint(0, 3)
        for step in range(saved_at + lost):
            batch = [number for loader in ranks for number in next(loader)[0].tolist()]
            if step < saved_at:
                yield batch
            if step + 1 == saved_at:
                states = [loader.state_dict() for loader in ranks]
                assert all(one == states[0] for one in states)
                state = states[0]
                done += saved_at


@pytest.mark.parametrize("trial", range(100))
def test_events_change_nothing_in_the_order(trial: int) -> None:
    """Steps after the last save are lost and done again; the rest is bit-equal, each once."""
    rng = random.Random(trial)
    num_samples = rng.randint(1, 40)
    undisturbed = Loader(Numbers(num_samples), 6, seed=trial)
    disturbed = steps_of(rng, num_samples, trial)
    read: list[int] = []
    for _ in range(20):
        batch = next(undisturbed)[0].tolist()
        assert next(disturbed) == batch
        read += batch
    for begin in range(0, len(read) - num_samples + 1, num_samples):
        assert sorted(read[begin : begin + num_samples]) == list(range(num_samples))


def test_workers_change_nothing_in_the_order() -> None:
    alone = Loader(Numbers(10), 4, dp_size=2, dp_rank=1, seed=3)
    loader = Loader(Numbers(10), 4, dp_size=2, dp_rank=1, seed=3, workers=2)
    for _ in range(3):
        assert torch.equal(next(loader)[0], next(alone)[0])
        assert loader.state_dict() == alone.state_dict()
    state = loader.state_dict()
    ahead = next(loader)[0]
    loader.load_state_dict(state)
    assert torch.equal(next(loader)[0], ahead)


class Broken(Numbers):
    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        raise DataError("row 3 is gone")


def test_an_error_of_a_worker_is_that_of_the_data() -> None:
    with pytest.raises(DataError, match=r"^row 3 is gone$"):
        next(Loader(Broken(4), 2, workers=1))


def test_other_data_are_refused_on_resume() -> None:
    state: dict[str, Any] = Loader(Numbers(10), 4).state_dict()
    with pytest.raises(DataError, match="samples would come twice or never"):
        Loader(Numbers(10), 4).load_state_dict({**state, "content": 8})
