"""The loader's laws: the ranks' parts join to the global batch, and a stream goes on exactly under
any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.datasets import Loader
from plait.datasets.random import RandomTokens
from plait.datasets.text import text
from plait.errors import DataError


class Squares:
    """(i, i * i); without a `batch` of its own."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index * index


def take(num: int, dataset: Any, global_batch: int, **keys: Any) -> list[tuple[Tensor, Tensor]]:
    loader = Loader(dataset, global_batch, **keys)
    return [next(loader) for _ in range(num)]


def assert_equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(num_samples=st.integers(1, 23), global_batch=st.integers(1, 9), dp_size=st.integers(1, 6))
def test_parts_join_to_the_global_batch_and_differ_by_one_at_most(
    num_samples: int, global_batch: int, dp_size: int
) -> None:
    data = Squares(num_samples)
    whole = take(7, data, global_batch, seed=3)
    parts = [
        take(7, data, global_batch, seed=3, dp_size=dp_size, dp_rank=rank)
        for rank in range(dp_size)
    ]
    for step, batch in enumerate(whole):
        joined = tuple(
            torch.cat(column) for column in zip(*(part[step] for part in parts), strict=True)
        )
        assert_equal(joined, batch)
        sizes = [len(part[step][0]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 9), before=st.integers(1, 4), after=st.integers(1, 4))
def test_resume_under_another_number_of_ranks_is_exact(cut: int, before: int, after: int) -> None:
    data = Squares(11)
    whole = take(12, data, 4)
    saved = [Loader(data, 4, dp_size=before, dp_rank=rank) for rank in range(before)]
    for _ in range(cut):
        for loader in saved:
            next(loader)
    states = [loader.state_dict() for loader in saved]
    assert all(state == states[0] for state in states)
    resumed = [Loader(data, 4, dp_size=after, dp_rank=rank) for rank in range(after)]
    for loader in resumed:
        loader.load_state_dict(states[0])
    for expected in whole[cut:]:
        joined = tuple(
            torch.cat(column) for column in zip(*(next(loader) for loader in resumed), strict=True)
        )
        assert_equal(joined, expected)


def test_an_epoch_has_every_sample_once_and_each_another_order() -> None:
    loader = Loader(Squares(10), 4)
    epochs = [
        [int(i) for _ in range(loader.batches_per_epoch) for i in next(loader)[0]] for _ in range(3)
    ]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_the_seeds() -> None:
    data = Squares(50)
    (first, _), (again, _), (other, _) = (take(1, data, 50, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_last_batch_is_short_and_an_empty_part_keeps_its_shape() -> None:
    sizes = [len(inputs) for inputs, _ in take(4, Squares(10), 4)]
    assert sizes == [4, 4, 2, 4]
    for data, shapes in [
        (Squares(5), ((0, 1), (0,))),
        (RandomTokens(6, 9, num_samples=5), ((0, 6), (0, 6))),
    ]:
        empty = take(2, data, 4, dp_size=3, dp_rank=0)[1]
        full = take(1, data, 4)[0]
        assert tuple(part.shape for part in empty) == shapes
        assert [part.dtype for part in empty] == [part.dtype for part in full]


def test_the_batch_of_a_data_set_equals_its_samples() -> None:
    data = RandomTokens(6, 9, num_samples=12)
    samples = [data[index] for index in range(12)]  # a list has no `batch`
    for fast, slow in zip(take(4, data, 5), take(4, samples, 5), strict=True):
        assert_equal(fast, slow)


def test_resuming_another_stream_is_refused() -> None:
    state = Loader(Squares(10), 4, seed=1).state_dict()
    with pytest.raises(DataError, match=r"saved with seed = 1 and now has 2.*go on with the seed"):
        Loader(Squares(10), 4, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match=r"= 10 and now has 11.*the files and the"):
        Loader(Squares(11), 4, seed=1).load_state_dict(state)


def test_errors() -> None:
    with pytest.raises(DataError, match="global_batch = 0"):
        Loader(Squares(3), 0)
    with pytest.raises(DataError, match=r"dp_rank = 2 is not in 0 .. 1"):
        Loader(Squares(3), 1, dp_size=2, dp_rank=2)
    with pytest.raises(DataError, match="no samples"):
        Loader(Squares(0), 1)
    ragged = [(torch.zeros(index + 1), 0) for index in range(3)]
    with pytest.raises(DataError, match="cannot be stacked"):
        next(Loader(ragged, 3))


@settings(deadline=None, max_examples=40)
@given(num_samples=st.integers(1, 23), global_batch=st.integers(1, 9), skipped=st.integers(0, 12))
def test_skipping_is_taking_without_looking(
    num_samples: int, global_batch: int, skipped: int
) -> None:
    data = Squares(num_samples)
    late = Loader(data, global_batch, dp_size=2, dp_rank=1, seed=5)
    late.skip(skipped)
    for batch in take(skipped + 9, data, global_batch, dp_size=2, dp_rank=1, seed=5)[skipped:]:
        assert_equal(next(late), batch)


@pytest.mark.parametrize("packed", [False, True])
def test_a_text_replaced_by_one_as_long_is_refused(tmp_path: Path, packed: bool) -> None:
    """The number of samples tells nothing there. A place saved without a checksum is taken."""
    file = tmp_path / "words.txt"
    file.write_bytes(b"abcdefgh" * 20)
    loader = Loader(text([file], 8, packed=packed), 4)
    next(loader)
    state = loader.state_dict()
    again = Loader(text([file], 8, packed=packed), 4)
    again.load_state_dict(state)
    assert again.position == 4
    file.write_bytes(b"abcdefgh" * 19 + b"abcdefgX")
    other = Loader(text([file], 8, packed=packed), 4)
    with pytest.raises(DataError, match="other tokens than those that the saved place is in"):
        other.load_state_dict(state)
    other.load_state_dict({key: value for key, value in state.items() if key != "content"})
    assert other.position == 4


def test_packed_files_cut_elsewhere_are_other_data(tmp_path: Path) -> None:
    """The bytes are the same, and other bytes see each other."""
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    contents = []
    for cut in (40, 41):
        files[0].write_bytes((b"abcdefgh" * 20)[:cut])
        files[1].write_bytes((b"abcdefgh" * 20)[cut:])
        contents.append(text(files, 8, packed=True).content)
    assert contents[0] != contents[1]
