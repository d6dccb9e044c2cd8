"""The parts of an engine that a checkpoint is made from."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from plait.comm import World
from plait.engine.loss_modules import LossModules
from plait.engine.state.copies import CopiesBeside
from plait.engine.state.local_parameters import LocalParameters
from plait.engine.update import Update
from plait.outer import Driver
from plait.parallel.data import DataStrategy
from plait.plan import Plan
from plait.values import JsonMapping


class TrainingState(Protocol):
    """A model in training, as saving and loading see it.

    Attributes:
        copies: copies of the state that are under way.
        holding: the parameters and buffers of this rank.
        loss_modules: what the loss has beside the model, which is not saved.
    """

    plan: Plan
    world: World
    model: nn.Module
    strategy: DataStrategy
    driver: Driver
    update: Update
    holding: LocalParameters
    loss_modules: LossModules
    copies: CopiesBeside

    @property
    def step_index(self) -> int:
        """Steps that were made."""

    def show_evaluated_weights(self) -> None:
        """Put the weights in place that are evaluated. Collective."""

    def scale_state(self) -> dict[str, list[float]]:
        """The dynamic scale of the loss; empty where there is none."""

    def resume(self, meta: JsonMapping) -> None:
        """Go on from the step and the dynamic scale in the meta data of a checkpoint."""
