"""`transformers.Trainer` under plans: losses, norms, rates, evaluation, saving and resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.comm import World
from plait.errors import CheckpointError, DataError, PlanError
from tests.loops import gpt2

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TOLERANCE = 1e-6


def accuracy(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"hits": float(np.sum(hits)), "rows": float(len(hits))}


def arguments(out: str, dp: int, **settings: Any) -> Any:
    from transformers import TrainingArguments

    settings = {"save_strategy": "no", "per_device_train_batch_size": 8 // dp, **settings}
    return TrainingArguments(
        output_dir=out,
        per_device_eval_batch_size=8 // dp,
        max_steps=10,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        max_grad_norm=0.5,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )


def run(world: World | None, out: str, plan: str, resume: str | None, settings: Any) -> Any:
    """The logs of ten steps with a Trainer, of plait under a plan or of the library's alone."""
    import transformers

    transformers.logging.set_verbosity_error()
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    dp = 1 if world is None else world.axis("dp").size
    with gpt2.as_rank(rank, size):
        parts: dict[str, Any] = {
            "model": gpt2.model(),
            "args": arguments(out, dp, **settings),
            "train_dataset": gpt2.samples(),
            "eval_dataset": gpt2.samples()[:13],
            "compute_metrics": accuracy,
        }
        trainer: Any
        if plan:
            from plait.loops.transformers import Trainer

            trainer = Trainer(**parts, plan=plan)
        else:
            trainer = transformers.Trainer(**parts)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        metrics = trainer.evaluate()
        return [[one[key] for key in ("loss", "grad_norm", "learning_rate")] for one in logs], [
            metrics[f"eval_{key}"] for key in ("loss", "hits", "rows")
        ]


def same(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=tolerance
    )


def test_ten_steps_are_those_of_one_device_and_resume_under_another_plan(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    wanted = run(None, str(tmp_path / "one"), "", None, {})
    saving = {"save_strategy": "steps", "save_steps": 5}
    out = str(tmp_path / "eight")
    plan = "pp2 tp2 dp2:zero1"
    for found in ranks(8, run, out, plan, None, saving, plan=plan):
        same(found[0], wanted[0])
        same(found[1], wanted[1])
    resume = str(tmp_path / "eight" / "checkpoint-5")
    other = "dp2:zero3"
    for found in ranks(2, run, str(tmp_path / "two"), other, resume, saving, plan=other):
        same(found[0][5:], wanted[0][5:])
        same(found[1], wanted[1])
    saved = type(gpt2.model()).from_pretrained(tmp_path / "eight" / "checkpoint-10")
    again = type(gpt2.model()).from_pretrained(tmp_path / "two" / "checkpoint-10")
    for name, value in saved.state_dict().items():
        torch.testing.assert_close(value, again.state_dict()[name], rtol=1e-5, atol=1e-5)


def test_batches_that_accumulate_are_one_step(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": 2}
    wanted = run(None, str(tmp_path / "one"), "", None, settings)
    for plan in ("dp2:zero2", "pp2"):
        found = ranks(2, run, str(tmp_path / "two"), plan, None, settings, plan=plan)[1]
        same(found[0], wanted[0])
        same(found[1], wanted[1])


def refusals(world: World, out: str) -> list[str]:
    from plait.loops.transformers import Trainer

    parts: dict[str, Any] = {"model": gpt2.model(), "train_dataset": gpt2.samples()}
    told = []
    with gpt2.as_rank(0, 1):
        for settings, plan in (
            ({"bf16": True}, "dp1"),
            ({"torch_compile": True}, "dp1"),
            ({}, "pp2:pipedream"),
            ({}, "dp2"),
        ):
            with pytest.raises(PlanError) as refused:
                Trainer(args=arguments(out, 1, **settings), plan=plan, **parts)
            told.append(str(refused.value))
        left = [{**row, "attention_mask": row["labels"] * 0} for row in gpt2.samples()]
        for row in left:
            row["attention_mask"][4:] = 1
        trainer = Trainer(
            model=gpt2.model(), args=arguments(out, 1), plan="dp1", train_dataset=left
        )
        with pytest.raises(DataError, match="pad on the right"):
            trainer.train()
        Path(out, "empty").mkdir(parents=True)
        trainer = Trainer(args=arguments(out, 1), plan="dp1", **parts)
        with pytest.raises(CheckpointError, match="has no folder 'plait'"):
            trainer._prepare_for_training(10, trainer.get_train_dataloader(), f"{out}/empty")
    return told


def test_what_a_plan_cannot_be_joined_with_is_said(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    told = ranks(1, refusals, str(tmp_path))[0]
    for text, part in zip(
        told,
        ("mixed_precision='bf16'", "say compile in the plan", "updates inside its step", "2 ranks"),
        strict=True,
    ):
        assert part in text
