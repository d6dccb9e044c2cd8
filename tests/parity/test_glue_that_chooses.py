"""Code between modules that leaves results out by a choice of its own: refused where a stage would
have zeros in the place of one, and equal to one device where it multiplies by 0.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.threaded import threaded
from tests.parity.few_steps import batch, drawn, optimizer
from tests.parity.harness import TOLERANCE

CHOICES: tuple[tuple[int, ...], ...] = ((0, 1, 1, 1), (1, 1, 1, 1), (1, 0, 1, 1))


class Chosen(nn.Module):
    """Computes the results of all layers and adds those that `keep` names, by `if` or by 0."""

    def __init__(self, *, by_zero: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.keep: tuple[int, ...] = CHOICES[0]
        self.by_zero = by_zero

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> [samples, 4]."""
        for keep, layer in zip(self.keep, self.layers, strict=True):
            result = layer(x).tanh()
            if self.by_zero:
                x = x + keep * result
            elif keep:
                x = x + result
        return x


def chosen(*, by_zero: bool) -> Chosen:
    model = Chosen(by_zero=by_zero)
    drawn(model)
    return model


def losses(world: World, plan: str, models: list[Chosen]) -> list[float]:
    """The losses of steps with other choices."""
    model = models[world.rank]
    engine = plait.build(
        model,
        f"{plan} precision:float64",
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        options=plait.Options(blocks="layers.*"),
        world=world,
    )
    found = []
    for model.keep in CHOICES:
        found.append(engine.step(batch(4)).loss)
    return found


def plain() -> list[float]:
    model = chosen(by_zero=False)
    update = optimizer(model.parameters())
    inputs, targets = batch(4)
    found = []
    for model.keep in CHOICES:
        loss = nn.functional.mse_loss(model(inputs), targets)
        found.append(float(loss.detach()))
        update.zero_grad()
        loss.backward()
        update.step()
    return found


@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "pp2 mb1"])
def test_a_result_that_the_example_did_not_need_is_refused(plan: str) -> None:
    models = [chosen(by_zero=False) for _ in range(2)]
    with pytest.raises(ModelError, match=r"needs the result of 'layers\.0'"):
        threaded(2, losses, plan, models, plan=plan)


@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "pp2 mb1"])
def test_a_result_that_is_multiplied_by_0_is_one_devices(plan: str) -> None:
    models = [chosen(by_zero=True) for _ in range(2)]
    for found in threaded(2, losses, plan, models, plan=plan):
        assert found == pytest.approx(plain(), rel=TOLERANCE, abs=0)
