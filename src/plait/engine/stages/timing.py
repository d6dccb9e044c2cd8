"""When gradients become an update: at the end of their own step, or in a later one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from plait.engine.loss import LossTotals
from plait.engine.stages.pipeline import PipelineStep
from plait.parallel.pipeline.actions import Action, Kind
from plait.parallel.pipeline.runtime import Handler


class UpdateTiming(ABC):
    """The actions of each step, and the handlers that update."""

    @abstractmethod
    def handlers(self, table: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers to use, given those of a step that updates at its end."""

    @abstractmethod
    def begin(self, step: PipelineStep, index: int) -> tuple[PipelineStep, Sequence[Action]]:
        """Step number `index` begins: the micro-batches under way in it, and its actions."""

    @abstractmethod
    def totals(self, updated: LossTotals) -> LossTotals:
        """The sums to report for the step, given those of its last update. Collective."""

    @abstractmethod
    def drain(self) -> Sequence[Action]:
        """The actions that are left over from past steps."""

    @abstractmethod
    def end_drain(self) -> None:
        """Every action that was left over has been executed."""

    @abstractmethod
    def show_newest(self) -> None:
        """Let the modules see the newest weights, for an evaluation."""

    @abstractmethod
    def older_weights(self) -> list[Tensor]:
        """Weights of older versions that are kept, each a flat buffer (padded_numel,)."""


class ImmediateUpdates(UpdateTiming):
    """Every step executes the same actions and updates at its end."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = tuple(actions)

    def handlers(self, table: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        return dict(table)

    def begin(self, step: PipelineStep, index: int) -> tuple[PipelineStep, Sequence[Action]]:
        return step, self._actions

    def totals(self, updated: LossTotals) -> LossTotals:
        return updated

    def drain(self) -> Sequence[Action]:
        return ()

    def end_drain(self) -> None:
        pass

    def show_newest(self) -> None:
        pass

    def older_weights(self) -> list[Tensor]:
        return []
