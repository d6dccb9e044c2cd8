"""Lightning's Trainer under plans: losses, norms, rates, evaluation, saving and resuming."""

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
from plait.errors import CheckpointError, ModelError, PlanError
from tests.loops import gpt2
from tests.loops.test_accelerate import rows
from tests.loops.test_transformers import same

pytest.importorskip("transformers")
pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS = 2  # of five steps of two batches


def module(**parts: Any) -> Any:
    """A user's LightningModule around a GPT-2 of `transformers`, which keeps what it has seen."""
    import lightning as L

    class Guess(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2.model()
            self.seen: list[list[float]] = []
            for name, part in parts.items():
                setattr(self, name, part)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            self.seen.append([float(loss), 0.0, self.optimizers().param_groups[0]["lr"]])
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", self.model(**batch).loss, sync_dist=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            params = [one for group in optimizer.param_groups for one in group["params"]]
            grads = [one.grad for one in params if one.grad is not None]
            self.seen[-1][1] = float(torch.nn.utils.get_total_norm(grads))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Guess()


def run(trainer: Any, batch_size: int, resume: Path | None) -> Any:
    guess = module()
    loader = DataLoader(rows()[:40], batch_size=batch_size)
    held_out = DataLoader(rows()[:11], batch_size=batch_size)
    trainer.fit(guess, loader, held_out, ckpt_path=resume)
    metrics = trainer.validate(guess, held_out, verbose=False)[0]
    return guess.seen, [float(metrics["held_out"])], int(trainer.global_step)


def settings(out: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    every = ModelCheckpoint(dirpath=out, filename="{epoch}", save_top_k=-1)
    return {
        "accelerator": "cpu",
        "max_epochs": epochs,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "callbacks": [every],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": out,
    }


def under(world: World, plan: str, out: Path, resume: Path | None) -> Any:
    import lightning as L

    from plait.loops.lightning import PlanStrategy

    with gpt2.as_rank(world.rank, world.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says of its own
        os.environ["GROUP_RANK"] = "0"
        strategy = PlanStrategy(plan)
        trainer = L.Trainer(devices=world.size, strategy=strategy, **settings(out))
        return run(trainer, 4 // world.axis("dp").size, resume)


def test_ten_steps_are_those_of_one_device_and_resume_under_another_plan(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    import lightning as L

    seen, held_out, steps = run(L.Trainer(devices=1, **settings(tmp_path / "one")), 4, None)
    assert steps == 10
    plan = "pp2 tp2 dp2:zero1"
    for found in ranks(8, under, plan, tmp_path / "eight", None, plan=plan):
        same(found[0], seen)
        same(found[1], held_out)
        assert found[2] == steps
    other = "dp2:zero3"
    saved = tmp_path / "eight" / "epoch=0.ckpt"
    for found in ranks(2, under, other, tmp_path / "two", saved, plan=other):
        same(found[0], seen[10:])
        same(found[1], held_out)
        assert found[2] == steps


def refusals(world: World, out: Path) -> None:
    import lightning as L

    from plait.loops.lightning import PlanStrategy

    def fitted(owner: Any, plan: str = "dp2", **others: Any) -> None:
        told = {**settings(out), **others}
        trainer = L.Trainer(devices=2, strategy=PlanStrategy(plan), **told)
        trainer.fit(owner, DataLoader(rows()[:8], batch_size=2))

    with gpt2.as_rank(world.rank, world.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says of its own
        os.environ["GROUP_RANK"] = "0"
        with pytest.raises(PlanError, match="updates inside its step"):
            PlanStrategy("pp2:pipedream")
        with pytest.raises(PlanError, match="say devices=4"):
            fitted(module(), plan="dp4")
        with pytest.raises(PlanError, match="say precision:bf16"):
            fitted(module(), precision="bf16-mixed")
        with pytest.raises(PlanError, match="clip by norm"):
            fitted(module(), gradient_clip_algorithm="value")
        manual = module()
        manual.automatic_optimization = False
        with pytest.raises(ModelError, match="manual optimization"):
            fitted(manual, accumulate_grad_batches=1, gradient_clip_val=None)
        with pytest.raises(ModelError, match="parameters in: model, head"):
            fitted(module(head=torch.nn.Linear(2, 2)))
        with pytest.raises(ModelError, match=r"call self\.model\.train\(\)"):
            fitted(module(model=gpt2.model().eval()))
        with pytest.raises(ModelError, match="give loss=function"):
            fitted(module(model=torch.nn.Linear(2, 2)))
        trainer = L.Trainer(devices=2, strategy=PlanStrategy("dp2"), **settings(out))
        with pytest.raises(CheckpointError, match="has no folder 'plait'"):
            trainer.fit(module(), DataLoader(rows()[:8], batch_size=2), ckpt_path=out)


def test_what_a_plan_cannot_be_joined_with_is_said(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks(2, refusals, tmp_path, plan="dp2")
