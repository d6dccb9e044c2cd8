"""Lightning's Trainer under a plan: `Trainer(strategy=PlanStrategy("pp2 dp2:zero1"), devices=4)`.

The loop stays the library's, and the LightningModule the user's. Its one model is exchanged for
that of the plan once `configure_optimizers` has run. A loader's batch is that of one data rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.engine.build import Options
from plait.engine.open_step import open_plan
from plait.errors import CheckpointError, ModelError, PlanError
from plait.loops.batches import seeded, shared
from plait.loops.calls import LossOfScript, calls_of
from plait.loops.module import EngineModule, make_module
from plait.mesh import Mesh
from plait.plan import Plan
from plait.values import JsonObject, PyTree

ENGINE: Final = "plait"
"""The folder of a checkpoint that has the engine's part."""

LOOP: Final = "loop.pt"
"""The file beside it that has everything of the library's."""


class TrainerStrategy(DDPStrategy):
    """A strategy of Lightning's Trainer that builds, trains and saves a model under a plan."""

    optimizers: list[Any]  # a property of the base

    def __init__(
        self,
        plan: Plan | str,
        *,
        loss: LossOfScript | None = None,
        options: Options | None = None,
        **settings: Any,
    ) -> None:
        """Take a plan beside the settings of Lightning's DDP strategy.

        `loss`: (output, targets) -> (sum, count) or a mean, for models that compute none.
        `options`: of `plait.build`.
        """
        super().__init__(**settings)
        self.plan = open_plan(plan)
        self._loss = loss
        self._options = options
        self._accumulates = False
        self._checkpoint: Path | None = None

    def setup_environment(self) -> None:
        """Join Lightning's ranks, as many as the plan needs.

        Raises:
            PlanError: another number of ranks, or a precision beside the plan's.
        """
        super().setup_environment()
        if self.world_size != self.plan.world_size:
            raise PlanError(
                f"plan '{self.plan}' needs {self.plan.world_size} ranks, and Lightning has "
                f"{self.world_size}; say devices={self.plan.world_size} (times num_nodes)"
            )
        if type(self.precision_plugin) is not Precision:
            raise PlanError(
                f"Lightning's precision is {self.precision_plugin.precision}; leave it out, and "
                "say precision:bf16 in the plan"
            )

    def setup(self, trainer: Any) -> None:
        """Put the model of the LightningModule under the plan. Collective.

        Raises:
            ModelError: the model is under the plan already.
        """
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False
        owner = self.lightning_module
        _check_loop(trainer, owner)
        self.model = owner
        name = _name_of_model(owner)
        inner = getattr(owner, name)
        fits = trainer.state.fn == TrainerFn.FITTING
        if not isinstance(inner, EngineModule):
            inner = self._build(trainer, inner, fits)
            setattr(owner, name, inner)
        elif fits:
            raise ModelError(
                "the model is under the plan already, with its optimizer; fit a new "
                "LightningModule, or go on with trainer.fit(module, ckpt_path=...)"
            )
        self._module: EngineModule = inner
        owner.to(self.root_device)

    def _build(self, trainer: Any, model: nn.Module, fits: bool) -> EngineModule:
        """The model under the plan, with the optimizer that the user configures."""
        calls = calls_of(model, self._loss)
        if not fits:
            unused = torch.optim.SGD(model.parameters(), lr=0.0)
            return make_module(calls, unused, self.plan, options=self._options)[0]
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ModelError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers; a plan trains one "
                "model with one"
            )
        own = self.optimizers[0]
        module, optimizer = make_module(
            calls, own, self.plan, options=self._options, more=lambda: self._accumulates
        )
        self.optimizers = [optimizer]
        return module

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context whose calls add to the gradients of a later one."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def process_dataloader(self, dataloader: DataLoader[PyTree]) -> DataLoader[PyTree]:
        """A loader of this rank's part of each batch. Collective where it shuffles."""
        mesh = Mesh.of(self.plan)
        rank = mesh.coordinate(self.global_rank, "dp")
        return shared(seeded(dataloader, self.broadcast), rank, mesh.dp, joined=mesh.dp)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Sums or means over all ranks; a mean of whole numbers is no whole one. Collective."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op == "mean":
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read by the engine, which setup makes."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the engine saves weights and moments by slices."""
        return {}

    def save_checkpoint(
        self, checkpoint: JsonObject, filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder: the engine's checkpoint, and the library's part. Collective."""
        folder = Path(filepath)
        self._module.engine.save(folder / ENGINE)
        if self.is_global_zero:
            torch.save(checkpoint, folder / LOOP)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete the folder of a checkpoint."""
        if self.is_global_zero and Path(filepath, ENGINE).is_dir():
            shutil.rmtree(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """The library's part of a checkpoint of any plan.

        Raises:
            CheckpointError: the folder has no state of a plan.
        """
        folder = Path(checkpoint_path)
        if not (folder / ENGINE).is_dir():
            raise CheckpointError(
                f"{folder} has no folder '{ENGINE}' with the state of a plan; load its weights "
                "into the model before the Trainer, or resume from what this strategy has saved"
            )
        self._checkpoint = folder
        return torch.load(folder / LOOP, weights_only=weights_only is not False)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load weights and moments together; where a batch must show the cut, with the first."""
        if self._checkpoint is not None:
            self._module.load_when_cut(self._checkpoint / ENGINE)


def _check_loop(trainer: Any, owner: Any) -> None:
    """Refuse a loop that a plan cannot follow."""
    if not owner.automatic_optimization:
        raise ModelError(
            "manual optimization (automatic_optimization = False) does not go with a plan here; "
            "use plait.loops.fabric, where the loop is yours, or automatic optimization"
        )
    if str(trainer.gradient_clip_algorithm).lower().endswith("value"):
        raise PlanError(
            "gradient_clip_algorithm='value' needs each gradient's values on one rank; clip by "
            "norm, gradient_clip_algorithm='norm'"
        )


def _name_of_model(owner: Any) -> str:
    """The name of the one module with parameters in a LightningModule."""
    with_parameters = [
        name for name, one in owner.named_children() if next(one.parameters(), None) is not None
    ]
    own = [name for name, _ in owner.named_parameters(recurse=False)]
    if len(with_parameters) != 1 or own:
        found = ", ".join([*with_parameters, *own]) or "none"
        raise ModelError(
            f"the LightningModule has parameters in: {found}; a plan splits one module, so put "
            "all of them into one attribute, as self.model"
        )
    name = with_parameters[0]
    if not getattr(owner, name).training:
        raise ModelError(
            f"self.{name} is in evaluation mode, as from_pretrained leaves it; call "
            f"self.{name}.train() in __init__"
        )
    return name


PlanStrategy = TrainerStrategy
"""The name that a script imports."""
