"""Hugging Face Accelerate under a plan: `Accelerator(plan="pp2 tp2 dp2:zero1")`.

The script stays: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `save_state`. A batch of
the script is that of one data rank, as in Accelerate, or the whole one with `split_batches`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from plait.engine.build import Options
from plait.engine.open_step import open_plan
from plait.errors import ModelError, PlanError
from plait.loops.batches import shared
from plait.loops.calls import LossOfScript, calls_of
from plait.loops.module import EngineModule, EngineOptimizer, make_module
from plait.loops.stand_in import check_norm, refuse_clip_by_value
from plait.mesh import Mesh
from plait.plan import Plan
from plait.values import PyTree

ENGINE = "plait"
"""The folder of a saved state that has the engine's part."""

SCRIPT = "script.pt"
"""The file beside it that has schedulers and registered objects."""


class PlanAccelerator(accelerate.Accelerator):
    """An Accelerator whose model, optimizer and batches are those of a plan."""

    def __init__(
        self,
        *args: Any,
        plan: Plan | str,
        loss: LossOfScript | None = None,
        options: Options | None = None,
        **settings: Any,
    ) -> None:
        """Take a plan beside the settings of Accelerate.

        `loss`: (output, targets) -> (sum, count) or a mean, for models that compute none.
        `options`: of `plait.build`.
        """
        self.plan = open_plan(plan)
        super().__init__(*args, **settings)
        self._check_settings()
        self.loss = loss
        self._plan_options = options
        self._module: EngineModule | None = None

    def _check_settings(self) -> None:
        """Refuse what only the plan says."""
        if self.num_processes != self.plan.world_size:
            raise PlanError(
                f"plan '{self.plan}' needs {self.plan.world_size} ranks, and accelerate sees "
                f"{self.num_processes}; start that many, with torchrun or accelerate launch"
            )
        wanted = {"no": ("float32", "float64"), "bf16": ("bf16",)}
        allowed = wanted.get(str(self.mixed_precision), ())
        if self.plan.precision not in allowed:
            raise PlanError(
                f"mixed_precision='{self.mixed_precision}' and plan '{self.plan}' differ; leave "
                "mixed_precision out, and say precision:bf16 in the plan"
            )
        for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"):
            if getattr(self.state, name, None) is not None:
                raise PlanError(
                    f"accelerate is configured with {name}, which would split the model again; "
                    "leave it out of the configuration (the plan takes its place)"
                )

    @property
    def module(self) -> EngineModule:
        """The prepared model.

        Raises:
            ModelError: none has been prepared.
        """
        if self._module is None:
            raise ModelError(
                "no model is under the plan yet; call accelerator.prepare(model, optimizer) with "
                "both at once"
            )
        return self._module

    def prepare(self, *args: object, device_placement: object = None) -> PyTree:
        """Put a model with its optimizer, loaders and schedulers under the plan. Collective."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if models and not isinstance(models[0], EngineModule):
            self._build(models, optimizers)
        made = tuple(self._prepared(one) for one in args)
        return made if len(made) > 1 else made[0]

    def _build(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        if len(models) > 1 or len(optimizers) != 1 or self._module is not None:
            raise ModelError(
                f"prepare was given {len(models)} models and {len(optimizers)} optimizers; a plan "
                "trains one model with one optimizer, and both are given in one call"
            )
        module, optimizer = make_module(
            calls_of(models[0], self.loss),
            optimizers[0],
            self.plan,
            options=self._plan_options,
            more=lambda: not self.sync_gradients,
            acts=lambda: self.sync_gradients,
        )
        self._module = module
        self._models.append(module)
        self._optimizers.append(optimizer)

    def train_with(self, loss: LossOfScript | None) -> None:
        """Train models that compute no loss with this one."""
        self.loss = loss

    def _prepared(self, one: object) -> object:
        if isinstance(one, nn.Module):
            return self._module
        if isinstance(one, EngineOptimizer | AcceleratedOptimizer):
            return one
        if isinstance(one, torch.optim.Optimizer):
            return self._optimizers[0]
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one)
        if isinstance(one, LRScheduler):
            return self.prepare_scheduler(one)
        return one

    def prepare_model(self, model: nn.Module, *args: object, **named: object) -> EngineModule:
        """The prepared model."""
        return self.module

    def prepare_optimizer(
        self, optimizer: object, device_placement: object = None
    ) -> EngineOptimizer:
        """The prepared optimizer."""
        return self._optimizers[0]

    @property
    def data_rank(self) -> tuple[int, int]:
        """This rank's place on the data axis, and its size."""
        if self._module is not None:
            return self._module.engine.world.worker
        mesh = Mesh.of(self.plan)
        return mesh.coordinate(self.process_index, "dp"), mesh.dp

    def prepare_data_loader(
        self,
        data_loader: DataLoader[PyTree],
        device_placement: object = None,
        slice_fn_for_dispatch: object = None,
    ) -> DataLoader[PyTree]:
        """A loader of this rank's part of each batch."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        rank, size = self.data_rank
        joined = 1 if self.split_batches else size
        prepared = prepare_data_loader(
            shared(data_loader, rank, size, joined=joined),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement,
            rng_types=["torch"] if self.num_processes > 1 else None,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(
        self, scheduler: LRScheduler | AcceleratedScheduler
    ) -> AcceleratedScheduler:
        """A scheduler that counts as Accelerate's does: once for each data rank."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        optimizer = self._optimizers[0] if self._optimizers else []
        steps = 1 if self.split_batches else self.data_rank[1]
        prepared = _DataScheduler(scheduler, optimizer, self.step_scheduler_with_optimizer, steps)
        self._schedulers.append(prepared)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the global norm, which is returned (0-dim). Errors: `PlanError` for another norm.

        Nothing is clipped, and None returned, where gradients still accumulate.
        """
        check_norm(norm_type)
        norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm)
        return norm

    def clip_grad_value_(self, parameters: object, clip_value: float) -> NoReturn:
        """Refused: ranks have the gradients in parts.

        Raises:
            PlanError: always.
        """
        refuse_clip_by_value()

    def gather(self, tensor: PyTree) -> PyTree:
        """Tensors of all data ranks, one after the other. Collective."""
        axis = self.module.engine.world.axis("dp")

        def joined(part: Tensor) -> Tensor:
            parts = axis.gather_objects(part.detach().cpu())
            return torch.cat([torch.atleast_1d(one) for one in parts]).to(part.device)

        return tree_map(joined, tensor)

    def gather_for_metrics(self, input_data: PyTree, use_gather_object: bool = False) -> PyTree:
        """Samples of all data ranks, each once, in the last batch too. Collective."""
        if use_gather_object:
            parts = self.module.engine.world.axis("dp").gather_objects(input_data)
            return [one for part in parts for one in part]
        gathered = self.gather(input_data)
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if left <= 0:
            return gathered
        return tree_map(lambda tensor: tensor[:left], gathered)

    def reduce(self, tensor: PyTree, reduction: str = "sum", scale: float = 1.0) -> PyTree:
        """Sums or means over the data ranks. Collective."""
        axis = self.module.engine.world.axis("dp")

        def summed(part: Tensor) -> Tensor:
            parts = torch.stack(axis.gather_objects(part.detach().cpu()))
            total = parts.sum(dim=0) if reduction != "mean" else parts.mean(dim=0)
            return (total * scale).to(part.device)

        return tree_map(summed, tensor)

    def unwrap_model(self, model: nn.Module, *args: object, **named: object) -> nn.Module:
        """The model as it is: under a plan it has no whole inside."""
        return model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights [...] on the first rank, and nothing on the others. Collective."""
        gather = self.module.engine.world.axis("world").gather_objects
        with tempfile.TemporaryDirectory() as own:
            folder = Path(gather(own)[0])
            self.module.save_pretrained(folder)
            weights: dict[str, Tensor] = {}
            for file in folder.glob("*.safetensors") if self.is_main_process else ():
                weights |= load_file(file)
            gather(None)
        return weights

    def save_model(
        self, model: nn.Module, save_directory: str | Path, *args: object, **named: object
    ) -> None:
        """Write the library's files. Collective."""
        self.module.save_pretrained(save_directory)

    def save_state(
        self, output_dir: str | Path | None = None, *args: object, **named: object
    ) -> str:
        """Write the engine's checkpoint, schedulers and registered objects. Collective."""
        folder = Path(output_dir or Path(self.project_dir) / "checkpoints")
        self.module.engine.save(folder / ENGINE)
        if self.is_main_process:
            script = {
                "schedulers": [one.state_dict() for one in self._schedulers],
                "optimizer": self._optimizers[0].state_dict(),
                "objects": [one.state_dict() for one in self._custom_objects],
            }
            torch.save(script, folder / SCRIPT)
        self.wait_for_everyone()
        return str(folder)

    def load_state(
        self, input_dir: str | Path | None = None, *args: object, **named: object
    ) -> None:
        """Load what `save_state` of any plan has written. Collective."""
        folder = Path(input_dir or Path(self.project_dir) / "checkpoints")
        self.cut_by_loader()
        self.module.engine.load(folder / ENGINE)
        script = torch.load(folder / SCRIPT, weights_only=True)
        self._optimizers[0].load_state_dict(script["optimizer"])
        for key, owners in (("schedulers", self._schedulers), ("objects", self._custom_objects)):
            for owner, state in zip(owners, script[key], strict=True):
                owner.load_state_dict(state)

    def cut_by_loader(self) -> None:
        """Cut a model that only a batch shows how to cut, by the first loader. Collective."""
        if self._dataloaders and not self.module.engine.is_cut:
            with torch.random.fork_rng():
                batch = next(iter(self._dataloaders[0].base_dataloader))
            self.module.prepare(batch)


class _DataScheduler(AcceleratedScheduler):
    """A scheduler that moves a number of steps for each step of the optimizer."""

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: EngineOptimizer | list[EngineOptimizer],
        follows: bool,
        steps: int,
    ) -> None:
        super().__init__(scheduler, optimizers, follows, split_batches=True)
        self._steps = steps

    def step(self, *args: Any, **named: Any) -> None:
        """Move on where the optimizer does."""
        for _ in range(self._steps):
            super().step(*args, **named)


Accelerator = PlanAccelerator
"""The name that a script imports."""
