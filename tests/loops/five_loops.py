"""The five loops, each as a user writes it: five steps of eight samples, with clipping.

`losses(world, loop, plan, family)` runs one under a plan, and without a world as the library itself
does on one device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from plait.comm import World
from tests.loops import gpt2

STEPS: Final = 5
BATCH: Final = 8
CLIP: Final = 0.5
LR: Final = 1e-2

MOE: Final[dict[str, Any]] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
    "max_position_embeddings": 12,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def model_of(family: str) -> Any:
    """A GPT-2, or a Mixtral, from its config."""
    if family == "gpt2":
        return gpt2.model()
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MOE))


def rows() -> list[dict[str, torch.Tensor]]:
    """The samples of all steps; every third row has labels that do not count."""
    return [
        {"input_ids": row["input_ids"], "labels": row["labels"]}
        for row in gpt2.samples()[: STEPS * BATCH]
    ]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


def losses(world: World | None, loop: str, plan: str, family: str, out: str) -> list[float]:
    """The loss of each step. Every rank has its own folder for what a library writes."""
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    dp = 1 if world is None else world.axis("dp").size
    with gpt2.as_rank(rank, size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say of their own
        if size > 1:
            os.environ["GROUP_RANK"] = "0"
        return LOOPS[loop](plan, model_of(family), dp, size, f"{out}/{rank}")


def with_accelerate(plan: str, model: Any, dp: int, size: int, out: str) -> list[float]:
    from accelerate.utils import DataLoaderConfiguration

    settings: dict[str, Any] = {
        "cpu": True,
        "dataloader_config": DataLoaderConfiguration(split_batches=True),
    }
    accelerator: Any
    if plan:
        from plait.loops.accelerate import Accelerator

        accelerator = Accelerator(plan=plan, **settings)
    else:
        import accelerate

        accelerator = accelerate.Accelerator(**settings)
    loader = DataLoader(rows(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def with_fabric(plan: str, model: Any, dp: int, size: int, out: str) -> list[float]:
    from lightning.fabric import Fabric

    settings: dict[str, Any] = {"accelerator": "cpu", "devices": size}
    if plan:
        from plait.loops.fabric import PlanStrategy

        settings["strategy"] = PlanStrategy(plan)
    fabric = Fabric(**settings)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=BATCH // dp))
    found = []
    for batch in loader:
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def with_lightning(plan: str, model: Any, dp: int, size: int, out: str) -> list[float]:
    import lightning as L

    class Guess(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.seen.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    settings: dict[str, Any] = {"accelerator": "cpu", "devices": size, "max_epochs": 1}
    if plan:
        from plait.loops.lightning import PlanStrategy

        settings["strategy"] = PlanStrategy(plan)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = L.Trainer(gradient_clip_val=CLIP, **settings, **dict.fromkeys(quiet, False))
    guess = Guess()
    trainer.fit(guess, DataLoader(rows(), batch_size=BATCH // dp))
    return guess.seen


def arguments(dp: int, out: str) -> dict[str, Any]:
    """Settings that a Trainer and TRL take alike."""
    return {
        "output_dir": out,
        "per_device_train_batch_size": BATCH // dp,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def logged(trainer: Any) -> list[float]:
    import transformers

    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_trainer(plan: str, model: Any, dp: int, size: int, out: str) -> list[float]:
    import transformers

    transformers.logging.set_verbosity_error()
    told = transformers.TrainingArguments(**arguments(dp, out))
    parts: dict[str, Any] = {"model": model, "args": told, "train_dataset": rows()}
    if not plan:
        return logged(transformers.Trainer(**parts))
    from plait.loops.transformers import Trainer

    return logged(Trainer(**parts, plan=plan))


def has_no_routers(model: Any) -> bool:
    return not hasattr(model.config, "output_router_logits")


def with_trl(plan: str, model: Any, dp: int, size: int, out: str) -> list[float]:
    import transformers
    import trl

    from tests.loops.test_trl import texts, tokenizer

    transformers.logging.set_verbosity_error()
    more = {} if has_no_routers(model) else {"router_aux_loss_coef": 0.0}
    told = trl.SFTConfig(bf16=False, **arguments(dp, out), **more)
    parts: dict[str, Any] = {"model": model, "args": told, "train_dataset": texts()}
    parts["processing_class"] = tokenizer()
    if not plan:
        return logged(trl.SFTTrainer(**parts))
    from plait.loops.trl import SFTTrainer

    return logged(SFTTrainer(**parts, plan=plan))


LOOPS: Final[dict[str, Callable[[str, Any, int, int, str], list[float]]]] = {
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "lightning": with_lightning,
    "trainer": with_trainer,
    "trl": with_trl,
}
PACKAGES: Final[dict[str, Iterable[str]]] = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning",),
    "lightning": ("lightning",),
    "trainer": ("accelerate",),
    "trl": ("trl", "datasets"),
}
