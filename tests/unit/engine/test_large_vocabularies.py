"""Plans whose logits go by groups of rows train as those whose logits are whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.engine.build import build
from plait.models import losses
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.families import family_of


def trained(world: World, plan: str) -> tuple[float, list[tuple[str, Tensor]]]:
    """The loss of the last step, and this rank's parameters."""
    family = family_of("split-gpt")
    engine = build(
        family.model(),
        f"{plan} precision:float64",
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    index, count = world.worker
    for batch in family.batches(8):
        result = engine.step(tuple(part.tensor_split(count)[index] for part in batch), trace=False)
    return result.loss, [(one.name, one.values.clone()) for one in engine.local_parameters()]


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "pp2:1f1b mb2", "pp2:zb-h1 dp2 mb2", "cp2"])
def test_logits_by_groups_of_rows_train_alike(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Plan.parse(plan).world_size
    whole = threaded(size, trained, plan, plan=plan)
    monkeypatch.setattr(losses, "LARGE_NUMEL", 0)
    monkeypatch.setattr(losses, "GROUP_NUMEL", 100)
    for (loss, params), (other, others) in zip(
        threaded(size, trained, plan, plan=plan), whole, strict=True
    ):
        assert loss == pytest.approx(other, rel=1e-13)
        for (name, value), (_, expected) in zip(params, others, strict=True):
            error = float((value - expected).abs().max()) if value.numel() else 0.0
            assert error < 1e-12, name
