"""`transformers.Trainer` under a plan: `Trainer(..., plan="pp2 tp2 dp2:zero1")`.

The loop stays the library's: arguments, callbacks, schedulers, logs, evaluation. Batches of
`per_device_train_batch_size` are those of one data rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from plait.engine.build import Options
from plait.errors import CheckpointError, ModelError, PlanError
from plait.loops.accelerate import ENGINE, PlanAccelerator
from plait.loops.calls import LossOfLoop
from plait.loops.module import EngineModule, ModelOutputs
from plait.plan import Plan
from plait.values import JsonObject, PyTree

SCHEDULER: Final = "scheduler.pt"

REFUSED: Final = (
    ("deepspeed", "the plan takes its place"),
    ("fsdp", "the plan takes its place; dpN:zero3 shards as FSDP does"),
    ("parallelism_config", "the plan takes its place"),
    ("activation_checkpointing", "say remat:full or remat:selective in the plan"),
    ("torch_compile", "say compile in the plan"),
    ("auto_find_batch_size", "plait estimate says what fits"),
    ("label_smoothing_factor", "give compute_loss_func"),
    ("neftune_noise_alpha", "noise would differ between ranks"),
    ("use_liger_kernel", "its loss needs logits and weights on one rank"),
    ("fp16", "say precision:bf16 in the plan"),
)
"""Arguments that the plan says instead, or that a split model cannot have."""


class PlanLoop:
    """The parts of a Trainer that a plan replaces; a class before `transformers.Trainer`."""

    accelerator: PlanAccelerator
    args: Any
    callback_handler: transformers.trainer_callback.CallbackHandler
    compute_loss_func: LossOfLoop | None
    current_gradient_accumulation_steps: int
    lr_scheduler: LRScheduler
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    processing_class: transformers.ProcessorMixin | None
    state: Any
    _created_lr_scheduler: bool
    _train_batch_size: int

    def __init__(
        self, *args: Any, plan: Plan | str, options: Options | None = None, **named: Any
    ) -> None:
        """Take a plan, and `options` of `plait.build`, beside what the Trainer takes."""
        self._plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self._options = options
        super().__init__(*args, **named)
        parameters = sum(param.numel() for param in self.model.parameters())
        self._flops_per_token = 6.0 * parameters

    def _build_accelerator_args(self, **named: object) -> JsonObject:
        settings: JsonObject = super()._build_accelerator_args(**named)  # type: ignore[misc]
        self._accelerator_args = settings
        return settings

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator of the plan in place of the library's.

        Raises:
            PlanError: an argument that does not go with a plan.
        """
        for name, cure in REFUSED:
            if getattr(self.args, name, None):
                raise PlanError(f"TrainingArguments({name}=...) does not go with a plan: {cure}")
        if not self.args.average_tokens_across_devices:
            raise PlanError(
                "TrainingArguments(average_tokens_across_devices=False) does not go with a plan, "
                "whose loss is the mean over all ranks' tokens; leave it out"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        settings = {**self._accelerator_args, "kwargs_handlers": None}
        self.accelerator = PlanAccelerator(plan=self._plan, options=self._options, **settings)
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing moves whole: each rank takes its parts to its device."""

    def _engine_module(self) -> EngineModule:
        """The model under the plan, which is built when it is first needed. Collective."""
        if isinstance(self.model_wrapped, EngineModule):
            return self.model_wrapped
        self.accelerator.train_with(self.compute_loss_func)
        self.create_optimizer()  # type: ignore[attr-defined]
        module: EngineModule
        module, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped = module
        return module

    def _prepare_for_training(
        self,
        max_steps: int,
        train_dataloader: DataLoader[PyTree],
        resume_from_checkpoint: str | None,
    ) -> tuple[nn.Module, DataLoader[PyTree]]:
        module = self._engine_module()
        if self._created_lr_scheduler:
            self.lr_scheduler = None  # type: ignore[assignment]  # until it is made below
            self._created_lr_scheduler = False
        self.create_scheduler(num_training_steps=max_steps)  # type: ignore[attr-defined]
        if resume_from_checkpoint is not None:
            self._resume(Path(resume_from_checkpoint))
        handler = self.callback_handler
        handler.model = self.model
        handler.optimizer = self.optimizer
        handler.lr_scheduler = self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return module, train_dataloader

    def _resume(self, folder: Path) -> None:
        """Load the engine's checkpoint, and where the scheduler was."""
        if not (folder / ENGINE).is_dir():
            raise CheckpointError(
                f"{folder} has no folder '{ENGINE}' with the state of a plan; load its weights "
                "with from_pretrained, or resume from a checkpoint that this Trainer has saved"
            )
        self.accelerator.cut_by_loader()
        self._engine_module().engine.load(folder / ENGINE)
        state = torch.load(folder / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(state["scheduler"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Nothing yet: weights and moments are loaded together, when the engine is there."""

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        self._engine_module().engine.load(folder / ENGINE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._engine_module().engine.save(Path(output_dir) / ENGINE)
        if self.args.should_save:
            state = {
                "scheduler": self.lr_scheduler.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Nothing: `_resume` has done it."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` reads. Collective."""
        folder = Path(output_dir or self.args.output_dir)
        self._engine_module().save_pretrained(folder)
        processing = self.processing_class
        if self.args.should_save:
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, PyTree],
        return_outputs: bool = False,
        num_items_in_batch: PyTree = None,
    ) -> PyTree:
        """The loss of all ranks' samples, over the number of labels that the Trainer counts.

        Raises:
            ModelError: a model that the plan has not split.
        """
        if not isinstance(model, EngineModule):
            raise ModelError("the Trainer was given a model that its plan has not split")
        model.weigh(by_counts=num_items_in_batch is not None)
        outputs: ModelOutputs = model(**inputs)
        loss = outputs.loss
        if num_items_in_batch is not None:
            loss = loss * (outputs.count / float(num_items_in_batch))
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, PyTree], num_items_in_batch: PyTree = None
    ) -> Tensor:
        """The loss (0-dim) of the forward and backward of one batch. Collective."""
        model.train()
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        detached: Tensor = loss.detach()
        return detached

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, PyTree],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, PyTree, PyTree]:
        """The loss (0-dim) of all ranks' samples, and this rank's logits [samples here, ...] and
        labels. Collective.
        """
        module = self._engine_module().eval()
        device = self.args.device
        items = self._get_num_items_in_batch([inputs], device)  # type: ignore[attr-defined]
        with torch.no_grad():
            loss, outputs = self.compute_loss(module, inputs, True, items)
            if prediction_loss_only:
                return loss, None, None
            return loss, outputs.logits, inputs["labels"]

    def evaluation_loop(self, *args: object, **named: object) -> transformers.EvalPrediction:
        """The library's own, over the model under the plan. Collective."""
        module = self._engine_module()
        whole = self.model
        self.model = module
        try:
            return super().evaluation_loop(*args, **named)  # type: ignore[misc]
        finally:
            self.model = whole

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Samples of a step: the batches of all data ranks."""
        total: int = self._train_batch_size * args.gradient_accumulation_steps
        return total * self.accelerator.data_rank[1]

    def floating_point_ops(self, inputs: dict[str, PyTree]) -> float:
        """Six for each parameter and token of this rank's samples."""
        tokens: Tensor | None = inputs.get("input_ids")
        return 0.0 if tokens is None else self._flops_per_token * tokens.numel()


class Trainer(PlanLoop, transformers.Trainer):  # type: ignore[misc]  # loose types there
    """`transformers.Trainer` whose model is split, trained and saved under a plan."""
