"""Lists of texts, as a `DataLoader` collates them, are divided with the samples they belong to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.comm import World
from plait.engine.prepare import share
from plait.values import PyTree

TEXTS = ["warp", "weft", "loom", "a shuttle", "heddle"]


class Spelled(nn.Module):
    """Classes of texts [B, 4], by the numbers of their letters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, texts: list[str], scale: Tensor | None = None) -> Tensor:
        numbers = [[text.count(letter) for letter in "aelo"] for text in texts]
        hidden = torch.tensor(numbers, dtype=self.head.weight.dtype)
        hidden = hidden if scale is None else hidden * scale[:, None]
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def batches(kind: str) -> list[PyTree]:
    classes = torch.tensor([0, 1, 2, 1, 0])
    scale = torch.linspace(1, 2, 5, dtype=torch.float64)
    made: dict[str, PyTree] = {
        "texts": (TEXTS, classes),
        "tuple": (tuple(TEXTS), classes),
        "texts and tensors": ((TEXTS, scale), classes),
        "mapping": {"texts": TEXTS, "scale": scale, "labels": classes},
    }
    return [made[kind]] * 3


def loss(output: Tensor, targets: PyTree) -> Tensor:
    labels = targets["labels"] if isinstance(targets, dict) else targets
    assert len(output) == len(labels)
    return F.cross_entropy(output, labels)


def trained(world: World | None, plan: str, kind: str) -> list[float]:
    torch.manual_seed(0)
    engine = plait.build(
        Spelled().double(),
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    losses = [engine.step(batch).loss for batch in engine.prepare(batches(kind))]
    return [*losses, engine.evaluate(batches(kind)[0])]


@pytest.mark.parametrize("kind", ["texts", "tuple", "texts and tensors", "mapping"])
@pytest.mark.parametrize("plan", ["dp2", "dp2 mb2", "pp2 mb2", "tp2 mb2"])
def test_texts_are_divided_over_ranks_and_micro_batches(ranks: Any, plan: str, kind: str) -> None:
    expected = trained(None, "dp1", kind)[:3]
    for losses in ranks(2, trained, plan, kind, plan=plan):
        assert losses[:3] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["texts", "mapping"])
@pytest.mark.parametrize("plan", ["tp4:2d", "tp4:2d mb2"])
def test_tensor_modes_that_divide_samples_divide_texts(ranks: Any, plan: str, kind: str) -> None:
    expected = trained(None, "dp1", kind)[:3]
    for losses in ranks(4, trained, plan, kind, plan=plan):
        assert losses[:3] == pytest.approx(expected, rel=1e-12)


class Joined(Spelled):
    """Takes two texts that are the same for all samples."""

    def forward(self, first: str, second: str) -> Tensor:  # type: ignore[override]
        return super().forward([first + second] * 4)


def test_two_texts_are_two_arguments_of_a_forward_that_takes_two() -> None:
    engine = plait.build(Joined(), "dp1", loss=loss, optimizer=torch.optim.SGD)
    engine.step((("warp", "weft"), torch.tensor([0, 1, 2, 1])))
    engine.world.close()


def of_texts(world: World) -> list[tuple[list[str], int]]:
    rows = [(text, place) for place, text in enumerate(TEXTS)]
    loader = DataLoader(rows, batch_size=4)
    return [(list(texts), len(places)) for texts, places in share(loader, world)]


def test_a_loader_keeps_a_text_for_a_rank_without_samples(ranks: Any) -> None:
    first, second = ranks(2, of_texts, plan="dp2")
    assert first == [(TEXTS[:2], 2), (TEXTS[4:], 0)]
    assert second == [(TEXTS[2:4], 2), (TEXTS[4:], 1)]


def test_texts_that_are_not_one_for_each_sample_stay_whole() -> None:
    seen = []

    def look(output: Tensor, targets: PyTree) -> Tensor:
        seen.append(targets[1])
        return F.cross_entropy(output, targets[0])

    engine = plait.build(nn.Linear(3, 5), "mb2", loss=look, optimizer=torch.optim.SGD)
    engine.step((torch.ones(4, 3), (torch.tensor([0, 1, 2, 1]), ["a", "b"])))
    engine.world.close()
    assert seen == [["a", "b"], ["a", "b"]]
