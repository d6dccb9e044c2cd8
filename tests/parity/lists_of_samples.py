"""Models and data of a user's own whose batches hold lists of one entry for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait import SampleList
from plait.values import PyTree

LETTERS = "abcdefgh"
SAMPLES = 24


class Blocks(nn.Module):
    """Hidden states [samples, 8] to two numbers [samples, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(len(LETTERS), 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def run(self, hidden: Tensor) -> Tensor:
        """The numbers of vectors [samples, 8]."""
        hidden = self.stem(hidden)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


class Bags(Blocks):
    """Two numbers for each of a list of bags [vectors, 8]."""

    def forward(self, bags: list[Tensor]) -> Tensor:
        assert isinstance(bags, list)
        return self.run(torch.stack([bag.mean(0) for bag in bags]))


class NormedBags(Bags):
    """The same, where outputs depend on the other samples of a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(len(LETTERS))

    def forward(self, bags: list[Tensor]) -> Tensor:
        return self.run(self.norm(torch.stack([bag.mean(0) for bag in bags])))


class Texts(Blocks):
    """Two numbers for each of a list of texts, by their letters."""

    def forward(self, texts: list[str]) -> Tensor:
        weight = self.stem.weight
        counts = [[text.count(letter) for letter in LETTERS] for text in texts]
        return self.run(torch.tensor(counts, dtype=weight.dtype, device=weight.device))


def bags() -> nn.Module:
    torch.manual_seed(0)
    return Bags()


def normed_bags() -> nn.Module:
    torch.manual_seed(0)
    return NormedBags()


def texts() -> nn.Module:
    torch.manual_seed(0)
    return Texts()


@dataclass(frozen=True)
class Entries:
    """Bags or texts by index; `batch` makes lists of them. `labels`: targets are a tensor."""

    kind: str
    labels: bool = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[PyTree, PyTree]:
        generator = torch.Generator().manual_seed(index)
        bag = torch.randn(index % 4 + 1, len(LETTERS), generator=generator)
        text = "".join(LETTERS[(index + place * place) % 8] for place in range(index % 5 + 1))
        boxes = torch.randn(index % 3 + 1, 2, generator=generator)
        target = boxes.mean(0) if self.labels else {"boxes": boxes}
        return bag if self.kind == "bags" else text, target

    def batch(self, indices: Tensor) -> tuple[PyTree, PyTree]:
        samples = [self[index] for index in indices.tolist()]
        inputs = [one for one, _ in samples]
        targets: list[Any] = [one for _, one in samples]
        return (
            SampleList(inputs) if self.kind == "bags" else inputs,
            torch.stack(targets) if self.labels else SampleList(targets),
        )


def bag_data() -> Entries:
    return Entries("bags")


def text_data() -> Entries:
    return Entries("texts", labels=True)


def text_and_list_data() -> Entries:
    return Entries("texts")


def loss(output: Tensor, targets: PyTree) -> Tensor:
    """A mean over samples; `targets` are a list of boxes [boxes, 2], or their means."""
    assert len(output) == len(targets)
    if not isinstance(targets, Tensor):
        targets = torch.stack([one["boxes"].mean(0) for one in targets])
    return (output - targets.to(output)).square().mean()
