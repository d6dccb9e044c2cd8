"""The engine: one rank's model, strategies and optimizer, driven by a schedule.

`step` hands a batch to the training step, which does the actions of the schedule, and tells what
came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plait.doctor.flight import Phase
from plait.engine.loss import LossFunction, MetricSum
from plait.engine.modes import TrainingModes
from plait.engine.parts import EngineParts, Uncut
from plait.engine.prepare import example_of, first_batch, share
from plait.engine.stages.whole_model import refuse_zeros
from plait.engine.state.copies import CopiesBeside
from plait.engine.state.memory import live_bytes
from plait.engine.state.shards import gradient_shards, with_decoded
from plait.engine.step import StepResult, void_result
from plait.engine.training_step import TrainingStep
from plait.engine.weight_modes import WeightModes
from plait.errors import ModelError
from plait.mesh import Shard
from plait.plan import shares_of
from plait.trace import Timeline
from plait.values import JsonMapping, JsonObject, PyTree

if TYPE_CHECKING:
    from plait.checkpoint import Checkpoint


class Engine:
    """Trains one model under one plan. Every method that is marked collective is called by all
    ranks.

    Attributes:
        plan: what the ranks run.
        world: the ranks and their axes.
        model: this rank's part of the model.
        guard: what happens to a step whose numbers are none.
        before_update: called with the engine in each step, before its update; alike on every rank.
        before_norm: called in each step, and may change the summed gradients before their norm is
            taken; alike on every rank. Where it has any, parameters without a gradient have zeros.
        copies: copies of the state that end before the sums of the next step.
    """

    def __init__(self, parts: EngineParts | Uncut) -> None:
        self.plan = parts.plan
        self.world = parts.world
        self.model = parts.model
        self.guard = parts.guard
        self.before_update: list[Callable[[Engine], None]] = []
        self.before_norm: list[Callable[[], None]] = []
        self.copies = CopiesBeside()
        self._uncut: Uncut | None = None
        self._waiting: Checkpoint | None = None
        if isinstance(parts, Uncut):
            self._uncut = parts
        else:
            self._take(parts)

    def _take(self, parts: EngineParts) -> None:
        """Take the parts of a model that is cut."""
        self.strategy = parts.strategy
        self.driver = parts.driver
        self.update = parts.update
        self.holding = parts.holding
        self.loss_modules = parts.loss_modules
        self.split = parts.split
        self._measured = parts.measure
        self._unchanged = parts.unchanged
        self._has_zeros = parts.has_zeros
        self.pipeline = parts.pipeline
        self.balance = parts.balance
        self.graphs = parts.graphs
        self._weights = WeightModes(
            parts.update.optimizer, parts.update.counts, parts.strategy.publish, self.copies.wait
        )
        self._training_step = TrainingStep(
            parts,
            TrainingModes(parts.model, self._weights),
            self.copies.wait,
            self._observe,
            lambda: bool(self.before_update or self.before_norm),
            before_norm=self.before_norm,
        )
        self._metrics = [parts.driver.metrics]
        if parts.split is not None:
            self._metrics.append(parts.split.details)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say why an attribute is missing where the model is not cut yet."""
            if self.__dict__.get("_uncut") is None or name.startswith("__"):
                raise AttributeError(f"an engine has no attribute '{name}'")
            what = name.strip("_").replace("_", " ")
            raise ModelError(
                f"the engine's {what} exists once its model is cut into stages, which the first "
                f"batch shows ({self.plan}); call engine.prepare(loader) or engine.step(batch) "
                "before, or give build the inputs of one sample as "
                "options=plait.Options(cutting=plait.Cutting(example=...))"
            )

    def __repr__(self) -> str:
        """The model, its plan, the rank and the steps that were made."""
        return (
            f"Engine({type(self.model).__name__}, '{self.plan}', "
            f"rank {self.world.rank} of {self.world.size}, {self.step_index} steps)"
        )

    def prepare(self, loader: Iterable[PyTree], shares: Sequence[float] = ()) -> Iterable[PyTree]:
        """The batches of a loader of whole global batches, of each this rank's part: tensors
        (samples here, ...). Lists of as many texts are divided too, also lists of metadata.

        `loader` is a torch `DataLoader`, a `plait.Loader` or any iterable of batches that every
        rank reads alike. `shares`: of the data ranks. Shuffling follows rank 0. Collective.
        """
        if not self.is_cut:
            self.training_step(first_batch(loader))
        return share(loader, self.world, shares_of(self.plan, shares))

    def step(self, batch: PyTree, *, trace: bool = True) -> StepResult:
        """Forward, backward and update on this rank's share of a global batch. Collective.

        `batch` is `(inputs, targets)`, or a mapping, of tensors (samples here, ...). Ranks may have
        different numbers of samples, also none. With `trace` the result's timeline holds every
        action and collective.

        Raises:
            NonFiniteLoss: a loss or gradient is no number; the parameters are those before the
                step. On a GPU the next step raises it, or `settle`.
            DataError: an unfit batch.
            ModelError: a parameter was frozen, or set free, since the engine was built. Or the
                model has zeros of an earlier engine, or autograd is off.
            OptimizerError: the optimizer that `build` got has a schedule, or other settings, since.
            OutOfMemory: the device has no room for the step.
        """
        if not torch.is_grad_enabled():
            raise ModelError(
                "engine.step was called under torch.no_grad() or torch.inference_mode(), where no "
                "gradient is computed; call it outside of that, and engine.evaluate(batch) for a "
                "loss without an update"
            )
        training_step = self.checked_step(batch)
        began = time.perf_counter()
        rolled_back = self.guard.rolls_back
        world = self.world
        timeline = Timeline(world.rank, enabled=trace)
        world.begin_timeline(timeline)
        earlier = world.ledger.copy()
        if not training_step.update.may_defer:
            training_step.update.read_pending()
        if self.guard.rolls_back and not rolled_back:
            return void_result(timeline, time.perf_counter() - began)
        step, actions = training_step.begin(batch, may_defer=True)
        reported_scale = training_step.update.scale.reported
        training_step.execute(actions, timeline, step)
        outcome = training_step.end(step, actions)
        if trace:
            timeline.mark_memory(self.memory())
        return StepResult(
            outcome=outcome,
            seconds=time.perf_counter() - began,
            timeline=timeline,
            ledger=world.ledger.since(earlier),
            details={key: value for metrics in self._metrics for key, value in metrics().items()},
            loss_scale=reported_scale,
        )

    def training_step(self, batch: object) -> TrainingStep:
        """The step by its parts; a model that is still whole is cut for the batch. Collective."""
        uncut = self._uncut
        if uncut is not None:
            with torch.inference_mode(mode=False), torch.enable_grad():
                whole = self.plan.pp.size * self.plan.micro_batches * self.plan.cp.size == 1
                parts = uncut.make(example_of(batch, whole=whole))
            self._uncut = None
            self._take(parts)
        if self._waiting is not None:
            from plait.engine.state.saving import load_from

            with torch.inference_mode(mode=False):
                load_from(self, self._waiting)  # one that fails does so in each step
            self._waiting = None
        return self._training_step

    def checked_step(self, batch: object) -> TrainingStep:
        """The step by its parts, after a look at what a caller may have changed since the build.
        Collective. Errors: those of `step` that are of its caller.
        """
        training_step = self.training_step(batch)
        self._check_filled()
        self._unchanged.check()
        return training_step

    def flush(self) -> None:
        """Empty an asynchronous pipeline: every gradient under way is computed and applied.
        Collective.

        `save` and the end of `fit` do it; it changes nothing under a synchronous schedule.
        """
        self.settle()
        self._training_step.flush()

    def settle(self) -> None:
        """Read the sums of the last step, where a GPU has decided on it by itself. Collective.

        Whatever reads or writes the state through the engine does it. Errors: those of `step`.
        """
        if self.is_cut:
            self._training_step.update.read_pending()

    @torch.no_grad()
    def evaluate(self, batch: object) -> float:
        """The mean loss over all ranks' shares (samples here, ...) of a batch; nothing is updated.
        Collective.

        It may be called between any two steps, with any number of samples. An asynchronous pipeline
        is not flushed for it: each stage uses its newest weights.
        """
        return self.measure(batch)[0].mean

    @torch.no_grad()
    def measure(self, batch: PyTree, functions: Sequence[LossFunction] = ()) -> list[MetricSum]:
        """The sums of the loss and of further functions over all ranks' shares of a batch.

        A function takes (output, targets) of a micro-batch and returns (sum, count), as a loss
        does. It sees whole outputs (samples, ...). Nothing is updated. Collective.
        """
        training_step = self.training_step(batch)
        self._check_filled()
        training_step.update.read_pending()
        return training_step.measure(batch, [self._measured(one) for one in functions])

    def save(self, path: str | Path, **meta: object) -> None:
        """Save parameters, optimizer state, step and random state, by slices; `meta` is stored
        beside them. Collective.
        """
        from plait.engine.state.saving import save

        self.flush()
        with self.world.recorder.flight.during(Phase.SAVING):
            save(self, Path(path), meta)

    def load(self, path: str | Path) -> JsonObject:
        """Load what any plan has saved, and return its `meta`. Collective.

        A model that is cut at the first batch is filled when it is cut.

        Raises:
            CheckpointError: it is missing or damaged, or of another model or optimizer. The engine
                must then not be used.
        """
        from plait.engine.state.saving import load_from, opened

        checkpoint = opened(Path(path), is_first=self.world.rank == 0)
        if not self.is_cut:
            self._waiting = checkpoint
            return checkpoint.meta
        self._waiting = None
        self.flush()
        return load_from(self, checkpoint)

    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, merge: bool = False
    ) -> list[Path]:
        """Save safetensors files that others load; no rank holds the whole model. Collective.

        Adapters are saved as PEFT's files, also those of a model that PEFT has wrapped, or with
        `merge` in the weights. Returns the files.
        """
        from plait.engine.state.pretrained import save_pretrained

        self.flush()
        return save_pretrained(self, Path(path), dtype=dtype, merge=merge)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's live state: parameters, gradients, optimizer, buffers."""
        return live_bytes(self, self._training_step.timing)

    def local_parameters(self) -> list[Shard]:
        """This rank's shard of each parameter, its values flat (numel,) in master precision.
        Collective on a GPU.
        """
        self.settle()
        return with_decoded([self.strategy], self.holding, trained=True)

    def local_gradients(self) -> list[Shard]:
        """This rank's shard of each gradient of the mean loss, flat (numel,) and before clipping;
        for use in `before_update`.
        """
        return gradient_shards(self.strategy, self.gradient_divisor, self.holding)

    def show_evaluated_weights(self) -> None:
        """Put the weights in place that are evaluated, where the optimizer has two sets of them,
        until the next step. Collective.
        """
        self._weights.eval()

    def scale_state(self) -> dict[str, list[float]]:
        """The dynamic scale of the loss, for the meta data of a checkpoint; empty without one."""
        return self._training_step.update.scale.meta()

    def resume(self, meta: JsonMapping) -> None:
        """Go on from the step, and the scale of the loss, that a checkpoint's meta data has."""
        self._training_step.resume(meta)
        self._weights.forget()
        self._has_zeros = False

    @property
    def may_defer(self) -> bool:
        """Whether the device may decide on the next step, so that its results are read later."""
        return self.is_cut and self._training_step.update.may_defer

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut into its stages, for which some plans need a batch."""
        return self._uncut is None

    @property
    def step_index(self) -> int:
        """Steps that were made."""
        if self.is_cut:
            return self._training_step.index
        return 0 if self._waiting is None else int(self._waiting.meta["step"])

    @property
    def gradient_divisor(self) -> float:
        """The divisor of gradients in `before_update`: the global count over `loss_divisor`.

        It is 1, times float16's scale, where the count was known before the step.
        """
        return self._training_step.update.divisor()

    @property
    def loss_divisor(self) -> float:
        """The number by which the last step's backward divided the sum of the losses.

        With float16 it is the count over the scale.
        """
        return self._training_step.update.loss_divisor

    @property
    def grad_norm(self) -> float:
        """The global norm of the last step's gradient, before clipping."""
        return self._training_step.update.grad_norm()

    def _check_filled(self) -> None:
        if self._has_zeros:
            refuse_zeros(self.model)

    def _observe(self) -> None:
        for observe in self.before_update:
            observe(self)
