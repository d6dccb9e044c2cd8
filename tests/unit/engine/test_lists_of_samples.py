"""`plait.SampleList`: lists of one entry for each sample, such as images of unequal sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait import SampleList
from plait.comm import World
from plait.engine.batch import BatchSplitter
from plait.engine.prepare import share
from plait.errors import DataError
from plait.values import PyTree

SIZES = (5, 8, 6, 7, 9)


class Detector(nn.Module):
    """One box [4] for each of a list of images [3, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, images: list[Tensor]) -> Tensor:
        assert isinstance(images, list)
        padded = torch.stack(
            [F.pad(one, (0, 9 - one.shape[2], 0, 9 - one.shape[1])) for one in images]
        )
        hidden = self.stem(padded).mean((2, 3))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def sample(place: int) -> tuple[Tensor, dict[str, Tensor]]:
    """An image [3, size, size], and as many boxes [boxes, 4] as the place says."""
    generator = torch.Generator().manual_seed(place)
    size = SIZES[place]
    image = torch.randn(3, size, size, generator=generator, dtype=torch.float64)
    return image, {"boxes": torch.rand(place + 1, 4, generator=generator, dtype=torch.float64)}


def collated(samples: list[PyTree]) -> PyTree:
    images, targets = zip(*samples, strict=True)
    return SampleList(images), SampleList(targets)


def batches(kind: str) -> list[PyTree]:
    images, targets = collated([sample(place) for place in range(len(SIZES))])
    if kind == "mapping":
        return [{"images": images, "targets": targets, "weights": torch.ones(len(SIZES))}] * 3
    return [(images, targets)] * 3


def loss(output: Tensor, targets: PyTree) -> Tensor:
    boxes = targets["targets"] if isinstance(targets, dict) else targets
    assert len(output) == len(boxes)
    wanted = torch.stack([one["boxes"].mean(0) for one in boxes])
    return (output - wanted).square().mean()


def trained(world: World | None, plan: str, kind: str) -> list[float]:
    torch.manual_seed(0)
    engine = plait.build(
        Detector().double(),
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    losses = [engine.step(batch).loss for batch in engine.prepare(batches(kind))]
    return [*losses, engine.evaluate(batches(kind)[0])]


@pytest.mark.parametrize("kind", ["pair", "mapping"])
@pytest.mark.parametrize(
    "plan", ["mb2", "dp2", "dp2:zero3 mb2", "pp2 mb2", "pp2:zbv mb4", "tp2 mb2", "tp4:2d mb2"]
)
def test_entries_are_divided_over_ranks_and_micro_batches(ranks: Any, plan: str, kind: str) -> None:
    expected = trained(None, "dp1", kind)
    size = plait.Plan.parse(plan).world_size
    for losses in ranks(size, trained, plan, kind, plan=plan):
        assert losses[:3] == pytest.approx(expected[:3], rel=1e-12)
    if size == 1:
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_rank_without_samples_takes_part(ranks: Any) -> None:
    expected = trained(None, "dp1", "pair")[:3]
    for losses in ranks(8, trained, "dp8", "pair", plan="dp8"):
        assert losses[:3] == pytest.approx(expected, rel=1e-12)


def loader_of(batch_size: int) -> DataLoader[PyTree]:
    data = [sample(place) for place in range(len(SIZES))]
    return DataLoader(data, batch_size=batch_size, collate_fn=collated)  # type: ignore[arg-type]


def counts(world: World) -> list[int]:
    return [images.num_samples for images, _ in share(loader_of(3), world)]


def test_a_loader_gives_a_placeholder_to_a_rank_without_samples(ranks: Any) -> None:
    assert ranks(4, counts, plan="dp4") == [[0, 0], [1, 1], [1, 0], [1, 1]]


def parts(world: World) -> list[int]:
    loader = loader_of(3)
    divided = share(loader, world)
    assert all(isinstance(images, SampleList) for images, _ in divided)
    return [image.shape[1] for images, _ in divided for image in images]


def test_a_loader_with_a_collate_function_is_shared(ranks: Any) -> None:
    assert ranks(2, parts, plan="dp2") == [[5, 7], [8, 6, 9]]


def test_numbers_get_the_precision_of_the_plan() -> None:
    splitter = BatchSplitter(Detector(), 2, torch.float32, torch.device("cpu"))
    micros = splitter.split(batches("pair")[0])
    assert [micro.num_samples for micro in micros] == [3, 2]
    assert {image.dtype for micro in micros for image in micro.inputs} == {torch.float32}
    assert micros[1].targets[1]["boxes"].shape == (5, 4)


def test_a_list_of_another_length_is_refused() -> None:
    splitter = BatchSplitter(Detector(), 2, torch.float32, torch.device("cpu"))
    images, targets = batches("pair")[0]
    with pytest.raises(DataError, match=r"they have \[4, 5\]"):
        splitter.split((images, SampleList(targets[:4])))


def step_of_plain_lists(world: World) -> str:
    images, targets = batches("pair")[0]
    engine = plait.build(Detector(), "pp2 mb2", loss=loss, optimizer=torch.optim.SGD, world=world)
    with pytest.raises(DataError) as told:
        engine.step((list(images), list(targets)))
    return str(told.value)


def test_a_pipeline_tells_the_cure_before_it_calls_the_model(ranks: Any) -> None:
    assert all("plait.SampleList" in text for text in ranks(2, step_of_plain_lists, plan="pp2 mb2"))


def test_a_plain_list_of_unequal_images_is_told_the_cure() -> None:
    splitter = BatchSplitter(Detector(), 2, torch.float32, torch.device("cpu"))
    images, targets = batches("pair")[0]
    with pytest.raises(DataError, match=r"plait\.SampleList"):
        splitter.split((images, list(targets)))


def test_a_list_without_entries_is_told_what_a_rank_without_samples_gives() -> None:
    splitter = BatchSplitter(Detector(), 2, torch.float32, torch.device("cpu"))
    with pytest.raises(DataError, match=r"no entry.*is_placeholder=True"):
        splitter.split((SampleList(), SampleList()))
