"""A script for Accelerate under plans: the losses, norms and weights of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from plait.comm import World
from plait.errors import ModelError, PlanError
from tests.loops import gpt2
from tests.loops.test_transformers import same

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in gpt2.samples()]


def script(accelerator: Any, saved: Path | None, resume: Path | None) -> Any:
    """A user's loop: ten steps, each of two batches of 4; after five a state is saved."""
    model = gpt2.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(rows()[:40], batch_size=4, shuffle=False)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume is not None:
        accelerator.load_state(resume)
    results = []
    for epoch in range(2):
        if epoch == 0 and resume is not None:
            continue
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = torch.zeros(())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            results.append([loss.item(), float(norm), scheduler.get_last_lr()[0]])
        if epoch == 0 and saved is not None:
            accelerator.save_state(saved)
    model.eval()
    hits = []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        guesses, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        hits.append((guesses[:, :-1] == labels[:, 1:]).float().mean().item())
    return results, hits, accelerator.get_state_dict(model)


def settings() -> dict[str, Any]:
    from accelerate.utils import DataLoaderConfiguration

    return {
        "cpu": True,
        "gradient_accumulation_steps": 2,
        "dataloader_config": DataLoaderConfiguration(split_batches=True),
    }


def under(world: World, plan: str, saved: Path | None, resume: Path | None) -> Any:
    from plait.loops.accelerate import Accelerator

    with gpt2.as_rank(world.rank, world.size):
        return script(Accelerator(plan=plan, **settings()), saved, resume)


def test_a_script_gives_the_losses_of_one_device_under_plans(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    from accelerate import Accelerator

    with gpt2.as_rank(0, 1):
        wanted = script(Accelerator(**settings()), None, None)
    plan = "pp2 tp2 dp2:zero1"
    found = ranks(8, under, plan, tmp_path / "state", None, plan=plan)
    for results, hits, _ in found:
        same(results, wanted[0])
        same(hits, wanted[1])
    weights = found[0][2]
    assert not any(state for _, _, state in found[1:])
    for name, value in weights.items():
        torch.testing.assert_close(value, wanted[2][name].cpu(), rtol=1e-5, atol=1e-5)
    other = "dp2:zero2"
    for results, hits, _ in ranks(2, under, other, None, tmp_path / "state", plan=other):
        same(results, wanted[0][10:])
        same(hits, wanted[1])


def uneven(accelerator: Any) -> list[float]:
    """Updates of two batches, whose labels are masked unevenly, the last one smaller."""
    loader = DataLoader(gpt2.samples(), batch_size=8)
    model = gpt2.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def under_uneven(world: World, plan: str) -> list[float]:
    from plait.loops.accelerate import Accelerator

    with gpt2.as_rank(world.rank, world.size):
        accelerator = Accelerator(plan=plan, **settings())
        with pytest.raises(PlanError, match="norm_type=1"):
            accelerator.clip_grad_norm_([], 1.0, norm_type=1)
        with pytest.raises(PlanError, match="by value"):
            accelerator.clip_grad_value_([], 1.0)
        return uneven(accelerator)


@pytest.mark.parametrize("plan", ["dp2:zero1", "pp2 mb2"])
def test_batches_of_several_counts_accumulate_as_on_one_device(
    ranks: Callable[..., list[Any]], plan: str
) -> None:
    from accelerate import Accelerator

    with gpt2.as_rank(0, 1):
        wanted = uneven(Accelerator(**settings()))
    for found in ranks(2, under_uneven, plan, plan=plan):
        same(found, wanted)


def per_process(world: World, plan: str) -> tuple[list[int], int]:
    """Samples of this rank's batches, and the rate's steps after one step of the optimizer."""
    from plait.loops.accelerate import Accelerator

    with gpt2.as_rank(world.rank, world.size):
        accelerator = Accelerator(plan=plan, cpu=True)
        model = gpt2.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step)
        loader = DataLoader(rows()[:10], batch_size=4)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        sizes = []
        for batch in loader:
            sizes.append(len(batch["labels"]))
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with pytest.raises(ModelError, match="a training step gives no logits"):
            _ = model(**batch).logits
        return sizes, int(scheduler.get_last_lr()[0]) - 1


def test_batches_and_rates_count_as_in_accelerate(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, per_process, "dp2", plan="dp2") == [([4, 1], 4)] * 2
    assert ranks(2, per_process, "tp2", plan="tp2") == [([4, 4, 2], 3)] * 2
