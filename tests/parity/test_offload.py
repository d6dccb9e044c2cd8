"""Activations that wait in host memory: equal to one device under every axis, and to the last bit
equal to the same plan that keeps them. On a processor the copies are real, so the code is too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine import offload
from plait.errors import ModelError, PlanError
from tests.parity import harness
from tests.parity.families import FAMILIES, family_of
from tests.parity.harness import TOLERANCE, check
from tests.parity.test_compile import quietly

Run = Callable[..., list[Any]]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("dp2:zero3 mb2", "gpt"),
        ("dp2:zero1 remat:full", "llama"),
        ("dp2:zero3 remat:full", "mixtral-balanced"),
        ("tp2:1d,sp", "split-llama"),
        ("tp4:2d dp1", "split-gpt"),
        ("pp2:1f1b mb4", "gpt-deep"),
        ("pp2:zbv tp2 mb4", "split-gpt-dropout"),
        ("pp2:zb-h1 mb4 remat:full", "gpt-deep"),
        ("cp2:ring", "long-llama"),
        ("dp2 ep2", "mixtral-balanced"),
        ("dp2:zero2 mb2", "resnet"),
    ],
)
def test_equals_one_device(ranks: Run, plan: str, family: str) -> None:
    samples = 8 if "mixtral" in family else 12
    outcome = check(ranks, f"{plan} precision:float64", family, samples, offload_activations=True)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["dp2:zero3 mb2 compile", "dp2 compile remat:full"])
def test_graphs_keep_what_they_keep_there(ranks: Run, plan: str) -> None:
    outcome = check(
        quietly(ranks),
        f"{plan} precision:float64",
        "gpt",
        compile_backend="aot_eager",
        offload_activations=True,
    )
    assert outcome.largest <= TOLERANCE, outcome


def trained(world: World, offloads: bool) -> list[Any]:
    """What training gives under a plan that keeps activations, or moves them."""
    family = family_of("llama")
    engine = harness.make_engine(world, "dp1", family, {"offload_activations": offloads})
    return harness.train(engine, family, 4)


def test_moves_change_no_bit(ranks: Run) -> None:
    [plain], [moved] = (ranks(1, trained, offloads, plan="dp1") for offloads in (False, True))
    for (loss, norm, grads, params), other in zip(plain, moved, strict=True):
        assert (loss, norm) == other[:2]
        for mine, theirs in zip([*grads, *params], [*other[2], *other[3]], strict=True):
            assert torch.equal(mine[3], theirs[3]), mine[0]


class Block(nn.Module):
    """Keeps its input twice, as itself and as a view, beside its weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * x.view(-1, 2, x.shape[-1] // 2).reshape(x.shape).sigmoid()


def blocks(count: int) -> nn.Sequential:
    """Blocks that offload."""
    model = nn.Sequential(*(Block() for _ in range(count)))
    offload.apply(model, [str(index) for index in range(count)], CPU)
    return model


def test_a_device_holds_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest block alone after the forward; in backward the one at work and the one before."""
    storages: list[ref[Any]] = []
    made = offload.Storage.__init__

    def noting(self: offload.Storage, device: Tensor) -> None:
        storages.append(ref(self))
        made(self, device)

    def there() -> int:
        alive = [found for one in storages if (found := one()) is not None]
        return sum(one.device is not None for one in alive)

    monkeypatch.setattr(offload.Storage, "__init__", noting)
    model = blocks(5)
    most: list[int] = []
    for block in model:
        block.register_full_backward_hook(lambda *_: most.append(there()))
    output = model(torch.randn(4, 8).requires_grad_())
    assert len(storages) == 15
    assert there() == 3
    output.sum().backward()
    assert len(most) == 5
    assert max(most) <= 6
    gc.collect()
    assert all(one() is None for one in storages)


def test_every_storage_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is kept as itself and as a view, the weight stays: three storages of 4 x 8."""
    copied: list[int] = []
    down = offload.Copies.down

    def counting(self: offload.Copies, tensors: Any) -> Any:
        copied.extend(len(one) for one in tensors)
        return down(self, tensors)

    monkeypatch.setattr(offload.Copies, "down", counting)
    blocks(1)(torch.randn(4, 8).requires_grad_()).sum().backward()
    assert copied == [4 * 8 * 4] * 3


class InPlace(nn.Module):
    """Changes what the block before it has kept."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Softmax(nn.Module):
    """Keeps its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def test_a_change_in_place_is_named() -> None:
    model = nn.Sequential(Softmax(), InPlace())
    offload.apply(model, ["0", "1"], CPU)
    with pytest.raises(ModelError, match="'0' needs a tensor of shape"):
        model(torch.randn(4, 8).requires_grad_()).sum().backward()


@pytest.mark.parametrize("remat", ["selective", "auto"])
def test_what_cannot_move_is_refused(remat: str) -> None:
    plan = f"dp1 remat:{remat}"
    options: dict[str, Any] = {"offload_activations": True}
    if remat == "auto":
        options["remat"] = ("full", "full")
    with pytest.raises(PlanError, match="keeps products by itself"):
        harness.make_engine(None, plan, FAMILIES["gpt"], options)  # type: ignore[arg-type]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="block by block"):
        offload.apply(nn.Linear(2, 2), [], CPU)
