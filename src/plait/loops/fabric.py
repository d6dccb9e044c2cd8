"""Lightning Fabric under a plan: `Fabric(strategy=PlanStrategy("pp2 tp2 dp2:zero1"), devices=8)`.

The script stays: `setup`, `setup_dataloaders`, `backward`, `clip_gradients`, `no_backward_sync`,
`save`, `load`. A loader's batch is that of one data rank, as in Fabric.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from plait.engine.build import Options
from plait.engine.open_step import open_plan
from plait.errors import CheckpointError, ModelError, PlanError
from plait.loops.batches import seeded, shared
from plait.loops.calls import LossOfScript, calls_of
from plait.loops.module import EngineModule, EngineOptimizer, make_module
from plait.loops.stand_in import check_norm, refuse_clip_by_value
from plait.mesh import Mesh
from plait.plan import Plan
from plait.values import JsonObject, PyTree

ENGINE = "plait"
"""The folder of a checkpoint that has the engine's part."""

SCRIPT = "script.pt"
"""The file beside it that has everything else."""


class PlanStrategy(DDPStrategy):
    """A strategy of Fabric that builds, trains and saves a model under a plan."""

    def __init__(
        self,
        plan: Plan | str,
        *,
        loss: LossOfScript | None = None,
        options: Options | None = None,
        **settings: Any,
    ) -> None:
        """Take a plan beside the settings of Fabric's DDP strategy.

        `loss`: (output, targets) -> (sum, count) or a mean, for models that compute none.
        `options`: of `plait.build`.
        """
        super().__init__(**settings)
        self.plan = open_plan(plan)
        self._loss = loss
        self._options = options
        self._accumulates = False
        self._loaders: list[DataLoader[PyTree]] = []
        self._backward_sync_control = _Accumulation(self)

    @contextmanager
    def accumulating(self, enabled: bool) -> Iterator[None]:
        """Gradients of calls inside add up, where `enabled`."""
        self._accumulates = enabled
        try:
            yield
        finally:
            self._accumulates = False

    def setup_environment(self) -> None:
        """Join Fabric's ranks, as many as the plan needs.

        Raises:
            PlanError: another number of ranks, or a precision beside the plan's.
        """
        super().setup_environment()
        if self.world_size != self.plan.world_size:
            raise PlanError(
                f"plan '{self.plan}' needs {self.plan.world_size} ranks, and Fabric has "
                f"{self.world_size}; say devices={self.plan.world_size} (times num_nodes)"
            )
        if type(self.precision) is not Precision:
            raise PlanError(
                f"Fabric's precision is {self.precision.precision}; leave it out, and say "
                "precision:bf16 in the plan"
            )

    def setup_module_and_optimizers(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: LRScheduler | None = None,
    ) -> tuple[EngineModule, list[EngineOptimizer], LRScheduler | None]:
        """Put a model with its optimizer under the plan. Collective.

        Raises:
            ModelError: more or fewer optimizers than one.
        """
        if len(optimizers) != 1:
            raise ModelError(f"a plan trains one model with one optimizer, not {len(optimizers)}")
        engine_module, optimizer = make_module(
            calls_of(module, self._loss),
            optimizers[0],
            self.plan,
            options=self._options,
            more=lambda: self._accumulates,
        )
        return engine_module, [optimizer], scheduler

    def setup_module(self, module: nn.Module) -> NoReturn:
        """Refused: the optimizer's state is split with the model.

        Raises:
            ModelError: always.
        """
        raise ModelError("call fabric.setup(model, optimizer) with both at once under a plan")

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        """Refused, as `setup_module`.

        Raises:
            ModelError: always.
        """
        raise ModelError("call fabric.setup(model, optimizer) with both at once under a plan")

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the global norm (0-dim). Errors: `PlanError` for another norm."""
        check_norm(norm_type)
        return super().clip_gradients_norm(
            module, optimizer, max_norm, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float | int
    ) -> NoReturn:
        """Refused: ranks have the gradients in parts.

        Raises:
            PlanError: always.
        """
        refuse_clip_by_value()

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing moves whole: each rank takes its parts to its device."""

    @property
    def distributed_sampler_kwargs(self) -> None:
        """None: batches are shared behind the sampler."""
        return None

    def process_dataloader(self, dataloader: DataLoader[PyTree]) -> DataLoader[PyTree]:
        """A loader of this rank's part of each batch. Collective where it shuffles."""
        mesh = Mesh.of(self.plan)
        rank = mesh.coordinate(self.global_rank, "dp")
        made = shared(seeded(dataloader, self.broadcast), rank, mesh.dp, joined=mesh.dp)
        self._loaders.append(made)
        return made

    def save_checkpoint(
        self,
        path: str | Path,
        state: JsonObject,
        storage_options: object = None,
        filter: object = None,
    ) -> None:
        """Write a folder: the engine's checkpoint, and all else of `state`. Collective.

        Raises:
            CheckpointError: a filter is given.
        """
        if filter:
            raise CheckpointError("a checkpoint under a plan is whole; leave filter out")
        folder = Path(path)
        module, others = _parted(state)
        module.engine.save(folder / ENGINE)
        if self.is_global_zero:
            kept = {
                key: value.state_dict() if hasattr(value, "state_dict") else value
                for key, value in others.items()
            }
            torch.save(kept, folder / SCRIPT)

    def load_checkpoint(
        self,
        path: str | Path,
        state: object = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> JsonObject:
        """Load what any plan has saved; what is left over is returned. Collective.

        Raises:
            CheckpointError: there is no state to fill.
        """
        folder = Path(path)
        if not isinstance(state, dict):
            raise CheckpointError(
                "fabric.load needs the state to fill under a plan: {'model': model, ...}"
            )
        module, others = _parted(state)
        if not module.engine.is_cut and self._loaders:
            with torch.random.fork_rng():
                module.prepare(next(iter(self._loaders[0])))
        module.engine.load(folder / ENGINE)
        saved: JsonObject = torch.load(folder / SCRIPT, weights_only=True)
        for key, value in others.items():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(key))
            else:
                state[key] = saved.pop(key)
        return saved


class _Accumulation:
    """Fabric's control of synchronisation: gradients accumulate inside."""

    def __init__(self, strategy: PlanStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which further calls add to the gradients, where `enabled`."""
        return self._strategy.accumulating(enabled)


def _parted(state: JsonObject) -> tuple[EngineModule, JsonObject]:
    """The model of a state, and all else."""
    models = [value for value in state.values() if isinstance(value, EngineModule)]
    if len(models) != 1:
        raise CheckpointError(
            f"the state has {len(models)} models that are set up; a checkpoint under a plan has "
            "one: {'model': model, 'optimizer': optimizer, ...}"
        )
    others = {key: one for key, one in state.items() if not isinstance(one, EngineModule)}
    return models[0], others
