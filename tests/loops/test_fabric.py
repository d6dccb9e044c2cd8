"""A script for Lightning Fabric under plans: the losses and norms of one device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from plait.comm import World
from plait.errors import ModelError, PlanError
from tests.loops import gpt2
from tests.loops.test_accelerate import rows
from tests.loops.test_transformers import same

pytest.importorskip("transformers")
pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of its own


def script(fabric: Any, batch_size: int, saved: Path | None, resume: Path | None) -> Any:
    """A user's loop: ten steps, each of two batches; after five a state is saved."""
    model = gpt2.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = fabric.setup_dataloaders(DataLoader(rows()[:40], batch_size=batch_size))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if resume is not None:
        assert fabric.load(resume, state) == {}
    results = []
    for epoch in range(int(state["epoch"]), 2):
        for index, batch in enumerate(loader):
            last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(**batch).loss
                fabric.backward(loss / 2)
            norm = torch.zeros(())
            if last:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            results.append([loss.item(), float(norm), scheduler.get_last_lr()[0]])
        if epoch == 0 and saved is not None:
            state["epoch"] = 1
            fabric.save(saved, state)
    return results


def under(world: World, plan: str, saved: Path | None, resume: Path | None) -> Any:
    from lightning.fabric import Fabric

    from plait.loops.fabric import PlanStrategy

    with gpt2.as_rank(world.rank, world.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says of its own, as where Slurm is there
        os.environ["GROUP_RANK"] = "0"
        strategy = PlanStrategy(plan)
        fabric = Fabric(accelerator="cpu", devices=world.size, strategy=strategy)
        fabric.launch()
        return script(fabric, 4 // world.axis("dp").size, saved, resume)


def test_a_script_gives_the_losses_of_one_device_under_plans(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    from lightning.fabric import Fabric

    wanted = script(Fabric(accelerator="cpu", devices=1), 4, None, None)
    plan = "pp2 tp2 dp2:zero1"
    for found in ranks(8, under, plan, tmp_path / "state", None, plan=plan):
        same(found, wanted)
    other = "dp2:zero3"
    for found in ranks(2, under, other, None, tmp_path / "state", plan=other):
        same(found, wanted[10:])


def refusals(world: World) -> None:
    from lightning.fabric import Fabric

    from plait.loops.fabric import PlanStrategy

    with gpt2.as_rank(world.rank, world.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says of its own, as where Slurm is there
        os.environ["GROUP_RANK"] = "0"
        with pytest.raises(PlanError, match="say devices=4"):
            Fabric(accelerator="cpu", devices=2, strategy=PlanStrategy("dp4")).launch()
        fabric = Fabric(accelerator="cpu", devices=2, strategy=PlanStrategy("dp2"))
        fabric.launch()
        with pytest.raises(ModelError, match="both at once"):
            fabric.setup(gpt2.model())


def test_what_a_plan_cannot_be_joined_with_is_said(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, refusals, plan="dp2")
