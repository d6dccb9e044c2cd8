"""A hook of a result's gradient works once, where the pipeline cuts behind that result too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options
from plait.engine.stages.cut import Cutting
from tests.helpers.pool import RanksFailed
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
WIDTH = 6


class Hooked(nn.Module):
    """Halves the gradient of what its second layer returns, which its last layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        drawn(self)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[1](self.layers[0](x).sin())
        if first.requires_grad:
            first.register_hook(lambda grad: grad * 0.5)
        x = self.layers[2](first.sin()).sin()
        last: Tensor = self.layers[3](x + first)
        return last


class Scaled(Hooked):
    """Halves the gradient that reaches the inputs of its second layer, by a hook of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def under_plan(
    world: World,
    plan: str,
    counts: tuple[int, ...],
    make: Callable[[], nn.Module] = Hooked,
) -> list[float]:
    pair = batch(WIDTH)
    cutting = Cutting(counts=counts, example=pair[0][:1])
    return losses(world, make(), plan, pair, options=Options(blocks="layers.*", cutting=cutting))


@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "pp2:zb-h1 mb2"])
def test_equals_one_device(ranks: Run, plan: str, counts: tuple[int, ...]) -> None:
    """The cut is before, at and behind the hook; behind it, both ranks read the result."""
    for found in ranks(2, under_plan, plan, counts, plan=plan):
        assert found == pytest.approx(plain(Hooked(), batch(WIDTH)), rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1)])
def test_a_backward_hook_of_a_module_within_a_stage(ranks: Run, counts: tuple[int, ...]) -> None:
    plan = "pp2:1f1b mb2"
    for found in ranks(2, under_plan, plan, counts, Scaled, plan=plan):
        assert found == pytest.approx(plain(Scaled(), batch(WIDTH)), rel=TOLERANCE, abs=0)


def test_a_backward_hook_right_at_a_cut_is_refused(ranks: Run) -> None:
    plan = "pp2:1f1b mb2"
    with pytest.raises(
        RanksFailed, match=r"'layers\.1' has a backward hook, .* cuts right behind it"
    ):
        ranks(2, under_plan, plan, (2, 2), Scaled, plan=plan)
