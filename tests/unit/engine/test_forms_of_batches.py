"""Whatever holds the tensors of a batch, they are divided with its samples, or refused by name."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import plait
from plait.batch_trees import leaves_of, map_tensors, structure_of
from plait.comm import World
from plait.engine.prepare import example_of
from plait.errors import DataError
from plait.values import PyTree


@dataclass(frozen=True)
class Pictures:
    """Pictures [B, 4], of which a mask [B] keeps some."""

    pixels: Tensor
    mask: Tensor | None = None
    name: str = "loom"


class Entries(Mapping[str, Tensor]):
    """A mapping that is no dict."""

    def __init__(self, entries: dict[str, Tensor]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Named(dict[str, Tensor]):
    """A dict that PyTorch takes for a leaf."""


class Opaque:
    """An object whose tensors nobody sees."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels


class Stored:
    """An object that keeps its tensors in a mapping, as the graphs of PyTorch Geometric do."""

    def __init__(self, pixels: Tensor) -> None:
        self.store = UserDict({"pixels": pixels, "edges": torch.zeros(2, 9)})


class Looks(nn.Module):
    """Classes [B, 3] of pictures, in whatever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, pictures: PyTree, scale: Tensor | None = None) -> Tensor:
        held = pictures if isinstance(pictures, Mapping) else vars(pictures)
        hidden = self.enter(held["pixels"])
        if held.get("mask") is not None:
            hidden = hidden * held["mask"][:, None]
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        hidden = hidden if scale is None else hidden * scale
        return self.head(hidden)


torch.manual_seed(3)
PIXELS = torch.randn(5, 4, dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, False])
CLASSES = torch.tensor([0, 1, 2, 1, 0])
HELD = {"pixels": PIXELS, "mask": MASK}

FORMS: dict[str, PyTree] = {
    "dataclass": ({"pictures": Pictures(PIXELS, MASK)}, CLASSES),
    "alone": (Pictures(PIXELS, MASK), CLASSES),
    "None": {"pictures": Pictures(PIXELS), "labels": CLASSES},
    "targets": ({"pictures": HELD}, SimpleNamespace(labels=CLASSES)),
    "mapping": {"pictures": Entries(HELD), "labels": CLASSES},
    "proxy": {"pictures": MappingProxyType(HELD), "labels": CLASSES},
    "dict": {"pictures": Named(HELD), "labels": CLASSES},
    "encoding": {"pictures": BatchEncoding(HELD), "labels": CLASSES},
    "number": {"pictures": HELD, "scale": torch.tensor(0.5), "labels": CLASSES},
}


def loss(output: Tensor, targets: PyTree) -> Tensor:
    labels = targets["labels"] if isinstance(targets, dict) else targets
    labels = labels.labels if isinstance(labels, SimpleNamespace) else labels
    assert len(output) == len(labels)
    return F.cross_entropy(output, labels)


def trained(world: World | None, plan: str, form: str) -> list[float]:
    torch.manual_seed(0)
    engine = plait.build(
        Looks().double(),
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    return [engine.step(batch).loss for batch in engine.prepare([FORMS[form]] * 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3 mb2", "tp2", "pp2"])
def test_the_samples_are_divided(ranks: Any, plan: str, form: str) -> None:
    expected = trained(None, "dp1", form)
    for losses in ranks(2, trained, plan, form, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", ["dataclass", "targets", "encoding"])
def test_tensor_modes_divide_them_too(ranks: Any, form: str) -> None:
    expected = trained(None, "dp1", form)
    for losses in ranks(4, trained, "tp4:2d", form, plan="tp4:2d"):
        assert losses == pytest.approx(expected, rel=1e-12)


def evaluated(model: nn.Module, batch: PyTree) -> float:
    """The mean loss of a batch in two parts."""
    plan = "mb2 precision:float64"
    engine = plait.build(model.double(), plan, loss=loss, optimizer=torch.optim.SGD)
    try:
        return engine.evaluate(batch)
    finally:
        engine.world.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Opaque, r"a Opaque, whose tensors \(pixels\) are not divided"),
        (Stored, r"a Stored, whose tensors \(pixels\) are not divided.*SampleList of one such"),
        (lambda one: {"pixels": one.to_sparse()}, r"a sparse_coo tensor of 5 samples"),
        (
            lambda one: {"pixels": torch.nested.as_nested_tensor(list(one), layout=torch.jagged)},
            r"a nested tensor of 5 samples",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(make: Callable[[Tensor], PyTree], said: str) -> None:
    with pytest.raises(DataError, match=said):
        evaluated(Looks(), ({"pictures": make(PIXELS)}, CLASSES))


def test_a_batch_without_samples_is_named_by_what_it_has() -> None:
    with pytest.raises(DataError, match=r"no tensor whose first dim .* it has NoneType, Stored"):
        evaluated(Looks(), ({"pictures": Stored(PIXELS)}, None))


def test_a_batch_of_another_form_is_named_before_a_model_is_cut() -> None:
    with pytest.raises(DataError, match=r"this one is a Pictures"):
        example_of(Pictures(PIXELS))


def stepped(batch: PyTree, plan: str) -> float:
    """The loss of a model whose only argument may be a mapping."""

    class OneArgument(Looks):
        def forward(self, pictures: PyTree) -> Tensor:  # type: ignore[override]
            return super().forward(pictures)

    engine = plait.build(
        OneArgument().double(),
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    )
    return engine.step(batch).loss


@pytest.mark.parametrize("plan", ["dp1", "mb2"])
@pytest.mark.parametrize("batch", [(HELD, CLASSES), {**HELD, "labels": CLASSES}])
def test_a_mapping_that_is_one_argument_stands_in_a_tuple(batch: PyTree, plan: str) -> None:
    said = r"mapping of pixels, mask.*forward needs pictures too.*\(\(mapping,\), targets\)"
    with pytest.raises(DataError, match=said):
        stepped(batch, plan)
    assert stepped(((HELD,), CLASSES), plan) > 0


def test_a_mapping_with_a_name_that_is_no_argument_is_named() -> None:
    batch = ({"pictures": HELD, "size": torch.ones(5)}, CLASSES)
    with pytest.raises(DataError, match=r"OneArgument.forward takes no size;"):
        stepped(batch, "dp1")


class Waves(nn.Linear):
    """Classes of complex numbers [B, 2]."""

    def forward(self, waves: Tensor) -> Tensor:
        return super().forward(torch.view_as_real(waves).flatten(1))


def test_complex_numbers_have_the_precision_of_the_plan() -> None:
    model = Waves(4, 3)
    waves = torch.view_as_complex(PIXELS.reshape(5, 2, 2))
    expected = evaluated(model, (waves, CLASSES))
    assert evaluated(model, (waves.to(torch.complex64), CLASSES)) == pytest.approx(expected, 1e-6)


def test_a_copy_has_other_tensors_and_the_original_its_own() -> None:
    whole = [Pictures(PIXELS, MASK), BatchEncoding(HELD), Entries(HELD), ["warp", "weft"]]
    part = map_tensors(lambda tensor: tensor[:2], whole)
    assert [type(one) for one in part] == [Pictures, BatchEncoding, dict, list]
    assert part[0].name == "loom" and part[0].pixels.shape == (2, 4)
    assert whole[0].pixels is PIXELS and whole[1]["mask"] is MASK
    assert leaves_of(whole)[-1] == ["warp", "weft"]
    assert structure_of(whole[:2]) == structure_of(part[:2])
    assert structure_of(Named(pixels=PIXELS)) != structure_of(Named(mask=PIXELS))


@dataclass
class Classes:
    """Labels [B] with what does not count samples: weights [C], sizes of another library."""

    labels: Tensor
    weights: Tensor
    sizes: Any = None
    parent: Any = None


def weighted(output: Tensor, classes: Classes) -> Tensor:
    """The mean of losses [B] of labels, each by the weight of its class."""
    assert len(classes.weights) == 4
    losses = F.cross_entropy(output, classes.labels, reduction="none")
    return (losses * classes.weights[classes.labels]).mean()


def weighted_losses(world: World | None, plan: str) -> list[float]:
    torch.manual_seed(0)
    classes = Classes(CLASSES, torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), np.zeros((5, 2)))
    classes.parent = classes
    engine = plait.build(
        Looks().double(),
        f"{plan} precision:float64",
        loss=weighted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    batch = ({"pictures": HELD}, classes)
    return [engine.step(one).loss for one in engine.prepare([batch] * 2)]


@pytest.mark.parametrize("plan", ["dp2", "tp2", "pp2 mb2"])
def test_a_dataclass_may_have_more_than_samples(ranks: Any, plan: str) -> None:
    expected = weighted_losses(None, "dp1")
    assert weighted_losses(None, "mb2") == pytest.approx(expected, rel=1e-12)
    for losses in ranks(2, weighted_losses, plan, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_loader_keeps_the_constants_of_a_dataclass() -> None:
    def collate(rows: list[Tensor]) -> PyTree:
        return {"pixels": torch.stack(rows)}, Classes(CLASSES[: len(rows)], torch.ones(4))

    engine = plait.build(Looks(), "dp1", loss=weighted, optimizer=torch.optim.SGD)
    for loader in (DataLoader(PIXELS, 3, collate_fn=collate), [collate(list(PIXELS))]):
        for _, classes in engine.prepare(loader):
            assert len(classes.weights) == 4


def summed(output: Tensor, classes: Classes) -> Tensor:
    """The mean of losses [B] of labels, times the sum of all weights."""
    return F.cross_entropy(output, classes.labels) * classes.weights.sum()


def losses_with_weights(world: World | None, plan: str, num_weights: int) -> list[float]:
    torch.manual_seed(0)
    batch = (torch.randn(8, 4), Classes(torch.arange(8) % 4, torch.arange(1.0, num_weights + 1)))
    engine = plait.build(
        nn.Sequential(nn.Linear(4, 4)).double(),
        f"{plan} precision:float64",
        loss=summed,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        world=world,
    )
    return [engine.step(one).loss for one in engine.prepare([batch] * 2)]


@pytest.mark.parametrize(("plan", "num_weights"), [("dp2 mb2", 4), ("dp2 mb3", 4), ("dp2 mb2", 2)])
def test_constants_as_long_as_a_share_stay_whole(ranks: Any, plan: str, num_weights: int) -> None:
    expected = losses_with_weights(None, "dp1", num_weights)
    for losses in ranks(2, losses_with_weights, plan, num_weights, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_constants_as_long_as_a_micro_batch_stay_whole_in_a_grid(ranks: Any) -> None:
    expected = losses_with_weights(None, "dp1", 2)
    for losses in ranks(4, losses_with_weights, "tp4:2d mb4", 2, plan="tp4:2d mb4"):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_forward_that_is_wrapped_after_the_build_gets_the_same_keys() -> None:
    model = Looks().double()
    engine = plait.build(model, "precision:float64", loss=loss, optimizer=torch.optim.SGD)
    before = model.forward

    def around(*args: Any, **named: Any) -> Tensor:
        return before(*args, **named)

    model.forward = around
    assert engine.step({"pictures": HELD, "labels": CLASSES}).loss > 0


class Masked(nn.Module):
    """Its mask comes from a hook, by which inputs have another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_forward_pre_hook(self._named, with_kwargs=True)

    def _named(self, model: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        rows = named.get("pictures", named.get("x"))
        return args, {"x": rows, "mask": torch.ones_like(rows)}

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x * mask)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4, 4), "labels": torch.arange(4)},
        ({"x": torch.ones(4, 4)}, {"labels": torch.arange(4)}),
        ({"pictures": torch.ones(4, 4)}, {"labels": torch.arange(4)}),
    ],
    ids=["a mapping", "inputs", "another name"],
)
def test_a_hook_may_give_a_forward_its_arguments(batch: PyTree) -> None:
    def labelled(output: Tensor, targets: PyTree) -> Tensor:
        return F.cross_entropy(output, targets["labels"])

    engine = plait.build(Masked(), "dp1", loss=labelled, optimizer=torch.optim.SGD)
    assert engine.step(batch).loss > 0
