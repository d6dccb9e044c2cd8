"""Lists of one entry for each sample: what `verify` counts, cuts, joins and marks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from plait import SampleList
from plait.batch_trees import entries_at, joined, tensors_of
from plait.plan import Plan
from plait.values import PyTree
from plait.verify.outside.rows import keys_of, reading, rows_of
from plait.verify.outside.task import Made
from plait.verify.record.samples import samples_of
from plait.verify.reference.batches import Batch, num_samples, taken
from plait.verify.reference.one_device import Slice, run_reference
from plait.verify.reference.recipe import Recipe
from tests.parity.verify_problems import problem

PARTS = (range(2), range(2, 2), range(2, 5))


@dataclass
class Targets:
    """Targets beside the weights of three classes."""

    labels: Tensor
    weights: Tensor
    scale: float = 0.5


def images() -> SampleList:
    return SampleList(torch.full((3, size), float(size)) for size in (5, 8, 6, 7, 9))


def texts() -> list[str]:
    return [f"text {number}" for number in range(5)]


def batches() -> dict[str, Batch]:
    labels = torch.arange(5)
    return {
        "list": (images(), SampleList({"boxes": torch.ones(n, 4)} for n in range(5))),
        "texts": (texts(), labels),
        "tuple of texts": (tuple(texts()), SampleList(texts())),
        "texts alone": (texts(), texts()),
        "mapping": ({"images": images(), "names": ["width", "height"], "size": 3}, labels),
        "dataclass": (torch.randn(5, 2), Targets(labels, torch.ones(3))),
    }


def same(one: PyTree, other: PyTree) -> bool:
    return str(one) == str(other) and type(one) is type(other)


@pytest.mark.parametrize("kind", batches())
def test_parts_join_to_the_batch(kind: str) -> None:
    batch = batches()[kind]
    parts = [taken(batch, rows) for rows in PARTS]
    assert num_samples(batch) == 5
    assert [num_samples(part) for part in parts] == [2, 0, 3]
    assert same(joined(parts), batch)


def test_an_entry_for_no_sample_is_not_joined() -> None:
    shares = [{"images": entries_at(images(), rows), "x": torch.zeros(len(rows))} for rows in PARTS]
    assert shares[1]["images"].is_placeholder
    whole = joined(shares)
    assert same(whole, {"images": images(), "x": torch.zeros(5)})
    assert not whole["images"].is_placeholder


def test_a_batch_without_samples_joins_to_itself() -> None:
    assert joined([{"scale": 2.0}, {"scale": 2.0}]) == {"scale": 2.0}


@pytest.mark.parametrize("kind", ["list", "texts", "tuple of texts", "texts alone", "mapping"])
def test_marks_of_parts_are_those_of_the_batch(kind: str) -> None:
    batch = batches()[kind]
    marks = samples_of(batch)
    assert [mark for rows in PARTS for mark in samples_of(taken(batch, rows))] == marks
    assert len(set(marks)) == 5


def test_an_entry_for_no_sample_has_no_mark() -> None:
    nothing = entries_at(images(), [])
    assert samples_of((nothing, nothing)) == []


def test_all_batches_are_joined() -> None:
    model = nn.Linear(1, 1)
    made = Made(model, [(images(), texts()), (images(), texts())], None)
    assert same(made.together, (SampleList([*images(), *images()]), texts() * 2))


@pytest.mark.parametrize("kind", ["list", "texts", "tuple of texts", "mapping"])
def test_samples_of_calls_are_found_in_lists(kind: str) -> None:
    batch = batches()[kind]
    keys = keys_of(batch)
    assert len(keys) == 5
    calls = [(rows_of(((taken(batch, rows)[0],), {}), keys),) for rows in ([0, 1], [4, 2, 3])]
    assert calls == [((0, 1),), ((4, 2, 3),)]
    parts = reading(calls, num_samples(batch)).slices(batch)
    assert same(parts[1].batch, taken(batch, [4, 2, 3]))


def test_a_plain_list_of_entries_is_found_too() -> None:
    batch = batches()["list"]
    assert rows_of((batch[0][1:3],), keys_of(batch)) == (1, 2)


def test_weights_as_long_as_a_share_are_not_cut() -> None:
    """A share of three samples is cut again, and the weights of three classes stay."""
    cut = problem("mlp").slices(Plan.parse("dp2 mb3"))
    parts = cut(0, (torch.randn(6, 2), Targets(torch.arange(6), torch.ones(3))))
    assert [part.batch[1].labels.tolist() for part in parts] == [[n] for n in range(6)]
    assert all(len(part.batch[1].weights) == 3 for part in parts)


class Mean(nn.Module):
    """One number of the mean of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.head(torch.stack([image.mean().reshape(1) for image in images]))


def loss(output: Tensor, targets: list[Tensor]) -> Tensor:
    assert len(output) == len(targets)
    wanted = torch.stack([target.sum().reshape(1) for target in targets])
    return (output - wanted).square().mean()


def slices(step: int, batch: Batch) -> list[Slice]:
    return [
        Slice(rank, number, taken(batch, [2 * rank + number] + [4] * (rank + number == 2)))
        for rank in range(2)
        for number in range(2)
    ]


def test_micro_batches_of_all_ranks_are_joined() -> None:
    torch.manual_seed(0)
    model = Mean()
    recipe = Recipe(loss, lambda params: torch.optim.SGD(list(params), lr=1e-3))
    data = [(images(), SampleList(tensors_of(images())))] * 2
    whole = run_reference(model, data, recipe)
    apart = run_reference(model, data, recipe, slices, by_micro_batch=True)
    assert [seen.count for seen in apart.steps] == [5.0, 5.0]
    for one, other in zip(whole.steps, apart.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
