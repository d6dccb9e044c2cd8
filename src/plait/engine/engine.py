"""The engine: one rank's model, strategies and optimizer, driven by a schedule.

`step` walks the list of actions; a table maps each kind to a handler here. A step without a
pipeline is the schedule with one stage, so there is no other path: `0UNSHARD 0F0 0B0 0F1 0REDUCE
0B1 0U`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.comm import World
from plait.doctor.flight import Phase
from plait.engine.axes import within_stage
from plait.engine.balance import Balance, Load
from plait.engine.batch import BatchSplitter
from plait.engine.explain import Explainer, explained, memory_error, token_error
from plait.engine.guard import Guard, Suspect
from plait.engine.loss import LossFunction, LossTotals, MetricSum, summed
from plait.engine.precision import LossScale, NoLossScale
from plait.engine.prepare import example_of, first_batch, share
from plait.engine.seeds import derive_seed, own_random_state
from plait.engine.stages.pipeline import Pipeline, PipelineStep
from plait.engine.stages.timing import UpdateTiming
from plait.engine.state.copies import CopiesBeside
from plait.engine.state.local_parameters import LocalParameters
from plait.engine.state.memory import live_bytes
from plait.engine.state.shards import gradient_shards, parameter_shards
from plait.engine.step import StepResult
from plait.engine.update import Update
from plait.errors import ModelError
from plait.mesh import Shard
from plait.origin import batch_norm_error
from plait.outer import Driver
from plait.parallel.data import DataStrategy
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.runtime import execute
from plait.parallel.tensor import TensorSplit
from plait.plan import Plan, shares_of
from plait.trace import Timeline
from plait.values import JsonObject, PyTree


@dataclass(frozen=True)
class EngineParts:
    """The finished parts of an engine.

    Attributes:
        reductions: the sums over ranks between the last backward and the update, in their order.
        timing: when the gradients of a step become an update.
        split: the layers that a tensor axis has split, if any.
        balance: the routers of a model with experts, if it has any.
        scale: the scale of the loss in backward.
        mean_of_workers: gradients are the mean of the workers' means.
        guard: judges each step before its update.
    """

    plan: Plan
    world: World
    model: nn.Module
    strategy: DataStrategy
    driver: Driver
    update: Update
    splitter: BatchSplitter
    pipeline: Pipeline
    timing: UpdateTiming
    reductions: Sequence[Callable[[], None]]
    holding: LocalParameters
    seed: int
    scale: LossScale | NoLossScale
    mean_of_workers: bool
    guard: Guard
    split: TensorSplit | None
    balance: Balance | None


@dataclass(frozen=True)
class Uncut:
    """A model that only a batch shows how to cut into stages; `make` cuts it, given the inputs of
    one sample. Collective.
    """

    plan: Plan
    world: World
    model: nn.Module
    guard: Guard
    make: Callable[[PyTree], EngineParts]


class Engine:
    """Trains one model under one plan. Every method that is marked collective is called by all
    ranks.

    Attributes:
        before_update: called with the engine in each step, before its update.
        copies: copies of the state that end before the sums of the next step.
    """

    def __init__(self, parts: EngineParts | Uncut) -> None:
        self.plan = parts.plan
        self.world = parts.world
        self.model = parts.model
        self.step_index = 0
        self.guard = parts.guard
        self.before_update: list[Callable[[Engine], None]] = []
        self.copies = CopiesBeside()
        self._uncut: Uncut | None = None
        if isinstance(parts, Uncut):
            self._uncut = parts
        else:
            self._take(parts)

    def _take(self, parts: EngineParts) -> None:
        self.strategy = parts.strategy
        self.driver = parts.driver
        self.update = parts.update
        self.holding = parts.holding
        self.step_index = parts.driver.first_step
        self.splitter = parts.splitter
        self.split = parts.split
        self._seed = parts.seed
        self._mean_of_workers = parts.mean_of_workers
        self._axis = parts.world.axis("dp")
        self._stages = parts.world.axis("pp")
        self._everyone = within_stage(parts.world)
        self._scale = parts.scale
        self._loss_scale = parts.scale.value
        self._pipeline = parts.pipeline
        together = parts.driver.is_synchronous
        self._suspect = Suspect(parts.world, parts.model, parts.pipeline, parts.strategy, together)
        self._timing = parts.timing
        self._reductions = (self.copies.settle, *parts.reductions)
        self._totals = LossTotals(0.0, 1.0, 0.0)
        self._updates_left = 0
        table = {
            **self._pipeline.handlers(),
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
        }
        self._handlers = self._timing.handlers(table)
        self._metrics = [parts.driver.metrics]
        self._explainers: list[Explainer] = [batch_norm_error(parts.model)]
        if parts.split is not None:
            self._metrics.append(parts.split.details)
            self._explainers.append(partial(parts.split.explain, parts.model))
        self._after_update: list[Callable[[], None]] = []
        self._load: Callable[[], Load | None] = lambda: None
        balance = parts.balance
        self._balance = balance
        if balance is not None:
            self._after_update.append(balance.after_update)
            self._load = lambda: balance.load

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say why an attribute is missing where the model is not cut yet."""
            if self.__dict__.get("_uncut") is None or name.startswith("__"):
                raise AttributeError(f"an engine has no attribute '{name}'")
            raise ModelError(
                f"the engine's {name} exists once its model is cut into stages, which the first "
                f"batch shows ({self.plan}); call engine.prepare(loader) or engine.step(batch) "
                "before, or give build the inputs of one sample as "
                "options=plait.Options(cutting=plait.Cutting(example=...))"
            )

    def prepare(self, loader: Iterable[PyTree], shares: Sequence[float] = ()) -> Iterable[PyTree]:
        """The batches of a loader of whole global batches, of each this rank's part.

        `loader` is a torch `DataLoader`, a `plait.Loader` or any iterable of batches that every
        rank reads alike. `shares`: of the data ranks. Shuffling follows rank 0. Collective.
        """
        if self._uncut is not None:
            self._cut_by(first_batch(loader))
        return share(loader, self.world, shares_of(self.plan, shares))

    def step(self, batch: PyTree, *, trace: bool = True) -> StepResult:
        """Forward, backward and update on this rank's share of a global batch. Collective.

        `batch` is `(inputs, targets)`, or a mapping; the first dim of every tensor counts samples.
        Ranks may have different numbers of samples, also none. With `trace` the result's timeline
        holds every action and collective.

        Errors: `NonFiniteLoss` (the parameters are then those before the step), `DataError` for an
        unfit batch, `OutOfMemory`.
        """
        self._cut_by(batch)
        began = time.perf_counter()
        world = self.world
        world.recorder.flight.enter(Phase.STEPPING)
        timeline = Timeline(world.rank, enabled=trace)
        world.timeline, earlier = timeline, world.ledger.copy()
        self.model.train()
        self.guard.begin(self.model)
        self._loss_scale = self._scale.value
        reported_scale = self._scale.reported
        step, actions = self._timing.begin(self._step_of(batch), self.step_index)
        self.driver.before_step()
        self._pipeline.begin(step)
        name = f"step {self.step_index + 1}"
        with explained(
            memory_error(world.rank, name),
            *self._explainers,
            token_error(self.model, step.pairs(), name),
        ):
            self._execute(actions, timeline)
        self._totals = self._timing.totals(self._totals)
        report = self.driver.report(self._totals.loss_sum, self._totals.count)
        self.step_index += 1
        if trace:
            timeline.mark_memory(self.memory())
        norm = self._grad_norm()
        self._scale.adapt()
        world.recorder.flight.step_done(self.step_index)
        return StepResult(
            loss=report.loss_sum / report.count if report.count else math.nan,
            grad_norm=norm,
            tokens=round(report.tokens * self._totals.tokens_per_count),
            count=report.count,
            seconds=time.perf_counter() - began,
            timeline=timeline,
            ledger=world.ledger.since(earlier),
            details={key: value for metrics in self._metrics for key, value in metrics().items()},
            load=self._load(),
            loss_scale=reported_scale,
            skipped=self._scale.skipped or self.guard.skipped,
        )

    def flush(self) -> None:
        """Empty an asynchronous pipeline: every gradient under way is computed and applied.
        Collective.

        `save` and the end of `fit` do it; it changes nothing under a synchronous schedule.
        """
        actions = self._timing.drain()
        with explained(memory_error(self.world.rank, "the flush"), *self._explainers):
            self._execute(actions, Timeline(self.world.rank, enabled=False))
        self._timing.end_drain()

    @torch.no_grad()
    def evaluate(self, batch: object) -> float:
        """The mean loss over all ranks' shares of a batch; nothing is updated. Collective.

        It may be called between any two steps, with any number of samples. An asynchronous pipeline
        is not flushed for it: each stage uses its newest weights.
        """
        return self.measure(batch)[0].mean

    @torch.no_grad()
    def measure(self, batch: PyTree, functions: Sequence[LossFunction] = ()) -> list[MetricSum]:
        """The sums of the loss and of further functions over all ranks' shares of a batch.

        A function takes (output, targets) and returns (sum, count), as a loss does. It sees whole
        outputs. Nothing is updated. Collective.
        """
        self._cut_by(batch)
        self.model.eval()
        self._timing.show_newest()
        if self.split is not None:
            functions = [self.split.loss(function, None) for function in functions]
        flight = self.world.recorder.flight
        with flight.during(Phase.EVALUATING), own_random_state(self.world.device):
            measured = self._pipeline.evaluate(self._step_of(batch), functions)
        return summed(measured, self.update.loss_copies, (self._everyone, self._stages))

    def save(self, path: str | Path, **meta: object) -> None:
        """Save parameters, optimizer state, step and random state, by slices; `meta` is stored
        beside them. Collective.
        """
        from plait.engine.state.saving import save

        self.flush()
        with self.world.recorder.flight.during(Phase.SAVING):
            save(self, Path(path), meta)

    def load(self, path: str | Path) -> JsonObject:
        """Load what any plan has saved, and return its `meta`. Collective."""
        from plait.engine.state.saving import load

        self.flush()
        return load(self, Path(path))

    def save_pretrained(
        self, path: str | Path, *, dtype: torch.dtype | None = None, merge: bool = False
    ) -> list[Path]:
        """Save safetensors files that others load; no rank holds the whole model. Collective.

        Adapters are saved as PEFT's files, or with `merge` in the weights. Returns the files.
        """
        from plait.engine.state.pretrained import save_pretrained

        self.flush()
        return save_pretrained(self, Path(path), dtype=dtype, merge=merge)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's live state: parameters, gradients, optimizer, buffers."""
        return live_bytes(self, self._timing)

    def local_parameters(self) -> list[Shard]:
        """This rank's shard of each parameter, in master precision."""
        return parameter_shards([self.strategy], self.holding)

    def local_gradients(self) -> list[Shard]:
        """This rank's shard of each gradient of the mean loss, before clipping; for use in
        `before_update`.
        """
        return gradient_shards(self.strategy, self._divisor(), self.holding)

    def scale_state(self) -> dict[str, list[float]]:
        """The dynamic scale of the loss, for the meta data of a checkpoint; empty without one."""
        return self._scale.meta()

    def load_scale(self, meta: Mapping[str, object]) -> None:
        """Take the scale from a checkpoint's meta data; other precisions have saved none."""
        self._scale.load_meta(meta)

    @property
    def gradient_divisor(self) -> float:
        """The divisor of gradients in `before_update`: the global count, times float16's scale."""
        return self._divisor()

    def _cut_by(self, batch: object) -> None:
        """Cut a model that is still whole. Collective."""
        uncut = self._uncut
        if uncut is not None:
            with torch.enable_grad():
                parts = uncut.make(example_of(batch))
            self._uncut = None
            self._take(parts)

    def _step_of(self, batch: PyTree, calls: int = 0) -> PipelineStep:
        micro_batches = self.splitter.split(batch)
        rank, size = self.world.worker
        first = (calls * size + rank) * len(micro_batches)
        return PipelineStep(
            dict(enumerate(micro_batches)),
            lambda index: self._seed_of(first + index),
            self._loss_scale,
        )

    def _seed_of(self, slice_index: int) -> int:
        return derive_seed(self._seed, "step", self.step_index, slice_index)

    def _execute(self, actions: Sequence[Action], timeline: Timeline) -> None:
        self._updates_left = sum(action.kind is Kind.UPDATE for action in actions)
        with own_random_state(self.world.device):
            begin = self.world.recorder.flight.action
            optional = frozenset({Kind.RESHARD})
            execute(actions, self._handlers, timeline, optional=optional, begin=begin)
            self._pipeline.end()

    def _reduce(self, action: Action) -> None:
        loss = self._pipeline.loss
        weight = loss.worker_weight(self._axis.size) if self._mean_of_workers else None
        self._pipeline.parts[action.stage].strategy.before_last_backward(weight)

    def _update(self, action: Action) -> None:
        self._updates_left -= 1
        if self._updates_left:  # one for each stage: the last of them updates all
            return
        self._sum_gradients()
        self._apply()

    def _sum_gradients(self) -> None:
        """Sum gradients and scalars over the ranks, before an update. Collective."""
        for reduction in self._reductions:
            reduction()
        self._totals = self.update.totals(
            self._pipeline.loss, self._everyone, self._stages, self.driver.sum_totals
        )

    def _apply(self, scale: float = 1.0) -> None:
        """Update by the gradients that were summed, times `scale`. Collective."""
        dropped = not self._scale.judge(self._totals.squared_norm, self.step_index + 1)
        step = self.step_index + 1
        dropped |= not self.guard.judge(self._totals, step, self._suspect, norm=not dropped)
        if dropped:
            self.strategy.publish()
        else:
            for observe in self.before_update:
                observe(self)
            change = self.update.change(self._totals, self.step_index, self._divisor() / scale)
            self.driver.apply(change)
        for act in self._after_update:
            act()

    def _divisor(self) -> float:
        return (1.0 if self._mean_of_workers else self._totals.count) * self._loss_scale

    def _grad_norm(self) -> float:
        return float(self._totals.squared_norm**0.5) / (self._divisor() or 1.0)
