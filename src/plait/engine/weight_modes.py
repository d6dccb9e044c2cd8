"""Optimizers with two sets of weights: those that a step moves, and those that are evaluated.

Schedule-free optimizers keep one set in place and exchange it: `optimizer.train()` comes before a
step, `optimizer.eval()` before an evaluation or a save. Every rank exchanges its own parts, which
all ranks then see. Source: Defazio et al. 2024 (arXiv 2405.15682), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.engine.group_counts import GroupCounts, numbers_of
from plait.errors import OptimizerError
from plait.parallel.data import has_modes
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES


class WeightModes:
    """The set of weights that is in place, of an optimizer that has two.

    Nothing is exchanged for an optimizer with one set.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counts: GroupCounts,
        publish: Callable[[], None],
        wait_for_copies: Callable[[], None],
    ) -> None:
        """`publish` lets every rank see the values of all ranks' parts. `wait_for_copies` returns
        when no copy of the state is under way any more.

        Raises:
            OptimizerError: the groups of the optimizer do not say which set is in place.
        """
        self._optimizer: Any = optimizer if has_modes(optimizer) else None
        self._publish = publish
        self._wait_for_copies = wait_for_copies
        self._is_training: bool | None = None
        if self._optimizer is not None:
            counts.note(_names_of_mode(self._optimizer))

    def train(self) -> None:
        """Put the weights in place that a step moves. Collective."""
        self._exchange(is_training=True)

    def eval(self) -> None:
        """Put the weights in place that are evaluated and saved. Collective."""
        self._exchange(is_training=False)

    def forget(self) -> None:
        """The state was written from outside; its groups say which set is in place."""
        self._is_training = None

    def _exchange(self, *, is_training: bool) -> None:
        if self._optimizer is None or self._is_training is is_training:
            return
        self._wait_for_copies()
        with torch.no_grad():
            if is_training:
                self._optimizer.train()
            else:
                self._optimizer.eval()
            self._publish()
        self._is_training = is_training


def _names_of_mode(optimizer: Any) -> set[str]:
    """The numbers of a new optimizer's groups that say which set of weights is in place."""
    try:
        optimizer.train()
        in_training = numbers_of(optimizer.param_groups[0])
        optimizer.eval()
        evaluated = numbers_of(optimizer.param_groups[0])
    except Exception as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} has train() and eval(), and one of them fails before the "
            f"first step: {type(error).__name__}: {error}. The engine calls both then; let them do "
            "nothing where there is no state yet"
        ) from error
    names = {name for name, value in evaluated.items() if in_training.get(name) != value}
    if not names:
        raise OptimizerError(
            f"{type(optimizer).__name__} has train() and eval(), and no number in its param_groups "
            "says which was called last, so that a checkpoint cannot hold it; keep it there, as "
            "group['train_mode']"
        )
    return names


def check_modes(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer with two sets of weights where a rank cannot exchange them for all.

    Errors: `OptimizerError`.
    """
    if has_modes(optimizer) and (
        plan.dp.offload
        or not STRATEGIES[plan.dp.strategy].synchronous
        or SCHEDULES[plan.pp.schedule].asynchronous
    ):
        raise OptimizerError(
            f"{type(optimizer).__name__} has train() and eval(), which exchange the weights of all "
            f"ranks at once, and under {plan} ranks have weights of several steps or of their "
            "host; take a strategy and a schedule that step together, without offload"
        )
