"""The parts that an engine is made of, finished, or the function that makes them of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from plait.comm import World
from plait.engine.balance import Balance
from plait.engine.batch import BatchSplitter
from plait.engine.deferral import Deferral
from plait.engine.expected_count import ExpectedCount
from plait.engine.graphs import StepGraphs
from plait.engine.guard import Guard
from plait.engine.loss import LossFunction
from plait.engine.loss_modules import LossModules
from plait.engine.precision import LossScale, NoLossScale
from plait.engine.stages.pipeline import Pipeline
from plait.engine.stages.timing import UpdateTiming
from plait.engine.state.local_parameters import LocalParameters
from plait.engine.unchanged import Unchanged
from plait.engine.update import Update
from plait.outer import Driver
from plait.parallel.data import DataStrategy
from plait.parallel.tensor import TensorSplit
from plait.plan import Plan
from plait.values import PyTree


@dataclass(frozen=True)
class EngineParts:
    """The finished parts of an engine.

    Attributes:
        reductions: the sums over ranks between the last backward and the update, in their order.
        timing: when the gradients of a step become an update.
        split: the layers that a tensor axis has split, if any.
        measure: makes a function of whole outputs one of this rank's.
        loss_modules: what the loss has beside the model.
        balance: the routers of a model with experts, if it has any.
        scale: the scale of the loss in backward, for float16.
        expected_count: what losses count, known before a step; None where the update takes sums.
        mean_of_workers: gradients are the mean of the workers' means.
        guard: judges each step before its update.
        graphs: the recorder of what comes before an update, where steps are recorded.
        deferral: decides on the device whether a step counts; None where the host does.
        unchanged: refuses a step after the caller changed what the engine was built from.
        has_zeros: whether the model was cut by an earlier engine, and has no numbers of others.
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
    expected_count: ExpectedCount | None
    mean_of_workers: bool
    guard: Guard
    split: TensorSplit | None
    measure: Callable[[LossFunction], LossFunction]
    loss_modules: LossModules
    balance: Balance | None
    graphs: StepGraphs | None
    deferral: Deferral | None
    unchanged: Unchanged
    has_zeros: bool


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
