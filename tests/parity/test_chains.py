"""A `Sequential` that does more than to call its children is cut with all that it does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.chain import find_chain
from plait.engine.stages.cut import Cutting
from plait.errors import ModelError
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
Change = Callable[[nn.Sequential], object]
PLAN = "pp2:1f1b mb2"


class Waves(nn.Sequential):
    """Layers with a sine behind each."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 6] -> the same."""
        for layer in self:
            x = layer(x).sin()
        return x


def model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    generator = torch.Generator().manual_seed(2)
    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    made = kind(first, nn.Linear(6, 6), nn.Linear(6, 6)).double()
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return made


def sine(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = nn.Sequential.forward(module, x).sin()  # type: ignore[arg-type]
    return made


CHANGES: dict[str, Change] = {
    "forward hook": lambda one: one.register_forward_hook(lambda _, __, result: result * 2),
    "forward pre-hook": lambda one: one.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "backward pre-hook": lambda one: one.register_full_backward_pre_hook(lambda _, g: (g[0] * 2,)),
    "forward": lambda one: setattr(one, "forward", MethodType(sine, one)),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(0)


def made(change: str, place: str, kind: type[nn.Sequential]) -> nn.Sequential:
    found = model(kind)
    if change:
        CHANGES[change](found if place == "model" else found[0])
    return found


def losses(world: World, *how: Any) -> list[float]:
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # inputs have no gradient
    engine = build(
        made(*how),
        f"{PLAN} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(cutting=Cutting(example=batch()[0][:1])),
        world=world,
    )
    return [engine.step(batch()).loss for _ in range(3)]


def plain(*how: Any) -> list[float]:
    found = made(*how)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    inputs, targets = batch()
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    numbers = []
    for _ in range(3):
        loss = F.mse_loss(found(inputs), targets)
        numbers.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return numbers


@pytest.mark.parametrize(
    ("change", "place", "kind"),
    [
        *((change, place, nn.Sequential) for change in CHANGES for place in ("model", "first")),
        ("", "", Waves),
    ],
)
def test_equals_one_device(ranks: Run, change: str, place: str, kind: type[nn.Sequential]) -> None:
    for found in ranks(2, losses, change, place, kind, plan=PLAN):
        assert found == pytest.approx(plain(change, place, kind), rel=TOLERANCE, abs=0)


def test_the_chain_of_a_sequential_has_its_innermost_layers() -> None:
    assert find_chain(model(), None) == ["0.0", "0.1", "0.2", "1", "2"]
    assert find_chain(made("forward hook", "first", nn.Sequential), None) == ["0", "1", "2"]
    assert find_chain(made("forward hook", "model", nn.Sequential), None) == []
    assert find_chain(model(Waves), None) == []


@pytest.mark.parametrize(("place", "what"), [("model", "the model"), ("first", "'0'")])
def test_a_chain_that_leaves_out_a_hook_is_refused(place: str, what: str) -> None:
    with pytest.raises(ModelError, match=f"leaves out the forward hook of {what}; leave chain out"):
        find_chain(made("forward hook", place, nn.Sequential), ["0.*", "1", "2"])
