"""The update: one sum of scalars over the ranks, one factor on the gradients, one step of the
optimizer.

The factor is clip / count: the global mean and the clipping by the global norm in one pass. There
is no pass where the optimizer's fused kernel takes a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.engine.by_hand import StepByHand
from plait.engine.draws_of_updates import DrawsOfUpdates
from plait.engine.group_counts import RATE, GroupCounts, rates_of, set_rates
from plait.engine.loss import LossSum, LossTotals
from plait.engine.one_pass import OnePass
from plait.engine.state.own_counts import OwnCounts
from plait.engine.sums import (
    LOSS_DIVISOR,
    NUM_TOTALS,
    StepSums,
    SumsLayout,
    check_orders,
    totals_of,
    unused,
)
from plait.errors import OptimizerError
from plait.models.parameters import OnWhole, Parameters
from plait.outer import Change
from plait.parallel.data import DataStrategy, OptimizerShard
from plait.parallel.data.elementwise import refuse_closures
from plait.parallel.data.gradients import BucketState
from plait.parallel.tensor import TensorSplit
from plait.torch_internals import numbers_on, takes_gradient_scale, tell_schedulers_of_step

# As torch.nn.utils.clip_grad_norm_ has it, so that the reference may use that.
CLIP_EPSILON = 1e-6

SCHEDULED = (RATE, "momentum", "betas", "weight_decay")
"""The settings of a group that torch's schedulers change."""

LearningRate = Callable[[int], float]
SumTotals = Callable[[Tensor, Axis], None]


class Update:
    """Sums the scalars of a step over ranks, scales, clips and steps.

    Attributes:
        optimizer: the optimizer of this rank's pieces.
        counts: the numbers that the optimizer changes in its groups.
        own_counts: the counts that it keeps in attributes of its own.
        clip_grad_norm: the largest norm of the gradient; None does not clip.
        loss_copies: ranks of the tensor axis that compute each sample's loss.
    """

    def __init__(
        self,
        strategy: DataStrategy,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad_norm: float | None = None,
        learning_rate: LearningRate | None = None,
        split: TensorSplit | None = None,
        rounds_sums: bool = False,
        seed: int = 0,
    ) -> None:
        """With `rounds_sums` the loss and the norm are rounded to float32.

        Their last bits in float64 depend on the order of the ranks. `seed` is of the run, from
        which an optimizer draws.
        """
        self._strategy = strategy
        self._rounds_sums = rounds_sums
        self.loss_copies = 1 if split is None else split.loss_copies
        self._weight = None if split is None else split.weight
        self.optimizer = optimizer
        self.counts = GroupCounts(optimizer, has_schedule=learning_rate is not None)
        self.own_counts = OwnCounts(optimizer)
        self._by_hand = StepByHand(optimizer)
        self._draws = DrawsOfUpdates(seed, self.device, strategy.pieces)
        self.clip_grad_norm = clip_grad_norm
        self._learning_rate = learning_rate
        self._sent: tuple[list[float], Tensor] | None = None
        self._base = rates_of(optimizer)
        self._one_pass = OnePass.of(optimizer, strategy)
        self._takes_scale = takes_gradient_scale(optimizer) and all(
            piece.value.dtype == torch.float32 for piece in strategy.pieces
        )

    def rate(self, step: int) -> float:
        """The schedule's factor on the learning rate at a step, from 0."""
        return 1.0 if self._learning_rate is None else self._learning_rate(step)

    def totals(
        self,
        loss: LossSum,
        axis: Axis,
        stages: Axis | None,
        sum_totals: SumTotals,
        *,
        drops_unused: bool = True,
    ) -> LossTotals:
        """The sums over all ranks of `axis` (data x tensor) and of the pipeline, `stages` (None: of
        this stage alone).

        Gradients that no rank of `axis` computed are taken away, or stay zeros. Collective.
        """
        sums = self.sums(loss, axis, stages, sum_totals)
        values = sums.read()
        check_orders(values, sums.layout)
        if drops_unused:
            self.drop_unused(values, sums.layout)
        return totals_of(values)

    def sums(
        self, loss: LossSum, axis: Axis, stages: Axis | None, sum_totals: SumTotals
    ) -> StepSums:
        """The sums behind the totals, on the device. Collective."""
        used = [index in state.touched for state, index in _slots(self._strategy)]
        layout = SumsLayout(used, self._strategy.gather_orders, rounds=self._rounds_sums)
        own_norm = self._strategy.squared_norm(self._weight)
        losses = torch.stack((loss.loss_sum, loss.count, loss.tokens))
        if self.loss_copies > 1:
            losses /= self.loss_copies
        loss_sum, count, tokens = losses.unbind()
        known = self._known(layout.numbers(loss.num_graphs), loss.count.device)
        scalars = torch.cat((torch.stack((loss_sum, count, own_norm, tokens)), known))
        sum_totals(scalars, axis)
        layout.note_orders(scalars)
        if stages is not None and stages.size > 1:
            sums = scalars[:NUM_TOTALS].clone()
            stages.all_reduce(sums, control=True).wait()
            scalars[:NUM_TOTALS] = sums
        scalars[LOSS_DIVISOR] = loss.divisor  # all ranks have agreed on it
        return StepSums(scalars, layout, own_norm)

    def squared_norm(self, axis: Axis | None, stages: Axis) -> float:
        """The squared norm of the gradients as they are now. Collective.

        It is over all ranks of `axis` (None: of this rank alone) and of the pipeline.
        """
        norm = self._strategy.squared_norm(self._weight).reshape(1)
        for ranks in (axis, stages):
            if ranks is not None and ranks.size > 1:
                ranks.all_reduce(norm, control=True).wait()
        return float(norm.float() if self._rounds_sums else norm)

    def _known(self, numbers: list[float], device: torch.device) -> Tensor:
        """Numbers of the host [n] on the device; the same ones are sent once."""
        if self._sent is None or self._sent[0] != numbers:
            self._sent = numbers, numbers_on(device, numbers, torch.float64)
        return self._sent[1]

    def drop_unused(self, values: Sequence[float], layout: SumsLayout) -> None:
        """Take the gradient away from parameters that no rank used, by the sums of all ranks."""
        gone = unused(values, layout)
        if gone:
            slots = _slots(self._strategy)
            self._drop_gradients([slots[index] for index in gone])

    def _drop_gradients(self, unused: Sequence[tuple[BucketState, int]]) -> None:
        """Take the gradient away from parameters that no rank used: the optimizer skips them."""
        slots = {id(state.bucket.slots[index]) for state, index in unused}
        for piece in self._strategy.pieces:
            if id(piece.part.slot) in slots:
                piece.value.grad = None

    def change(self, totals: LossTotals, step: int, divisor: float) -> Change:
        """The update to ask for: a factor on the gradients, with the mean and the clipping by the
        global norm.

        `divisor` turns summed gradients into those of the mean loss; 0 says that there are none.
        """
        factor = 1.0 / divisor if divisor else 0.0
        if self.clip_grad_norm is not None:
            norm = float(totals.squared_norm**0.5) * factor
            factor *= min(1.0, self.clip_grad_norm / (norm + CLIP_EPSILON))
        return Change(step, factor)

    def make(self, change: Change) -> None:
        """One step of the optimizer over this rank's pieces."""
        if change.on_device is None and not change.factor:
            return
        if self._learning_rate is None:
            with self._settings_of(change):
                self._step(change)
            return
        self.counts.note_schedule()
        scheduled = self.rate(change.step)
        set_rates(self.optimizer, self._base, scheduled * change.rate)
        self._step(change)

    def ask_later(self) -> list[dict[str, Any]]:
        """An update is asked for that comes after the caller's step.

        The settings that schedulers change in each group, with their values of now.
        """
        tell_schedulers_of_step(self.optimizer)
        return [_scheduled(group) for group in self.optimizer.param_groups]

    @contextmanager
    def _settings_of(self, change: Change) -> Iterator[None]:
        """Have the settings and the factor on the learning rates of one step.

        Those of now are the caller's, and a scheduler goes on from them.
        """
        if change.rate == 1.0 and change.settings is None:
            yield
            return
        groups = self.optimizer.param_groups
        before = [{key: group[key] for key in SCHEDULED if key in group} for group in groups]
        for group, settings in zip(groups, change.settings or before, strict=True):
            group.update(settings)
            if group.get(RATE) is not None:
                group[RATE] = group[RATE] * change.rate
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)

    def _step(self, change: Change) -> None:
        factor = change.factor
        if self._one_pass is not None and self._one_pass.step(change):
            return
        optimizer: Any = self.optimizer
        pieces = self._strategy.pieces
        if self._strategy.copies is not None:
            widen_gradients(pieces)
        if self._takes_scale:
            device = pieces[0].value.device if pieces else self.device
            optimizer.grad_scale, optimizer.found_inf = _scale_and_flag(change, device)
        else:
            grads: list[Tensor] = [
                piece.value.grad for piece in pieces if piece.value.grad is not None
            ]
            if grads and factor != 1.0:
                torch._foreach_mul_(grads, factor)
        self._draws.begin(change.step)
        with self._by_hand.opened():
            self.counts.step()

    @property
    def device(self) -> torch.device:
        """Where gradients are computed."""
        return self._strategy.group.device

    @property
    def decides_on_device(self) -> bool:
        """Whether the optimizer's kernel takes factor and flag from the device, for all pieces.

        A rank without pieces does not mind. torch's fused SGD leaves a momentum undefined in a
        first step that changes nothing.
        """
        pieces = self._strategy.pieces
        if not pieces:
            return True
        has_momentum = any(group.get("momentum") for group in self.optimizer.param_groups)
        here = all(one.value.device == self.device for one in pieces)
        return self._takes_scale and here and not has_momentum


def _scheduled(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that schedulers change, as copies."""
    return {key: _copied(group[key]) for key in SCHEDULED if key in group}


def _copied(setting: Any) -> Any:
    """A setting that stays what it is; a rate in a tensor is changed in its place."""
    return setting.clone() if isinstance(setting, Tensor) else setting


def _scale_and_flag(change: Change, device: torch.device) -> tuple[Tensor, Tensor]:
    """The divisor of gradients and the flag that fused kernels take: 0-dim, float32."""
    decided = change.on_device
    if decided is not None:
        scale = decided.factor.reciprocal()
        return scale.to(device, torch.float32), decided.blocked.to(device, torch.float32)
    # `full` runs on the device, where `tensor` would have the host wait for a copy
    scale = torch.full((), 1.0 / change.factor, dtype=torch.float32, device=device)
    return scale, torch.zeros((), dtype=torch.float32, device=device)


def widen_gradients(pieces: Sequence[OptimizerShard]) -> None:
    """Give every piece its gradient [...] in the precision of its value, for torch's optimizers."""
    for piece in pieces:
        if piece.value.grad is not None:
            piece.value.grad = piece.value.grad.to(piece.value.dtype)


def partial_sums(strategy: DataStrategy, split: TensorSplit | None) -> list[Callable[[], None]]:
    """The sum over the tensor axis, as a step of a reduction; empty where layers are whole."""
    return [] if split is None else [partial(_sum_partial, strategy, split)]


def _sum_partial(strategy: DataStrategy, split: TensorSplit) -> None:
    """Sum gradients of which each rank of the tensor axis has a summand. Collective."""
    pieces = [(piece.name, piece.value.grad) for piece in strategy.pieces]
    split.sum_partial([(name, grad) for name, grad in pieces if grad is not None])


def _slots(strategy: DataStrategy) -> list[tuple[BucketState, int]]:
    """Every trainable parameter, by bucket and index."""
    return [(state, index) for state in strategy.states for index in range(len(state.bucket.slots))]


def made_optimizer(
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
    strategy: DataStrategy,
    shapes: Mapping[str, Sequence[int]] | None = None,
    whole: OnWhole | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of this rank's pieces, whole parameters or flat parts (numel,). A rank that
    owns none gets one over nothing.

    `shapes`: of the model's parameters, by name and in its order, which the pieces get too.
    `whole`: where ranks hold parts of matrices. Raises `OptimizerError` for a function that returns
    no optimizer, or one of other parameters.
    """
    place = {name: index for index, name in enumerate(shapes or {})}
    named = [(piece.name, piece.value) for piece in strategy.pieces]
    named.sort(key=lambda pair: place.get(pair[0], len(place)))
    if not named:
        named = [("nothing", nn.Parameter(torch.zeros(0)))]
    optimizer = make_optimizer(Parameters(named, shapes, whole))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            "optimizer= must be a function that returns a torch.optim.Optimizer; it returned a "
            f"{type(optimizer).__name__}"
        )
    refuse_closures(optimizer)
    _refuse_strangers(optimizer, [param for _, param in named])
    return optimizer


def _refuse_strangers(optimizer: torch.optim.Optimizer, given: Sequence[nn.Parameter]) -> None:
    """Raise `OptimizerError` for parameters that the user's function was not given."""
    known = {id(param) for param in given}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in held if id(param) not in known]
    if strangers:
        raise OptimizerError(
            f"the function of optimizer= made a {type(optimizer).__name__} over {len(strangers)} "
            f"of {len(held)} parameters that it was not given, such as one of shape "
            f"{list(strangers[0].shape)}; the engine gives it a rank's own parts of the model's "
            "parameters, and would train no others: use its argument, and for groups the names in "
            "params.named(); or give the optimizer itself, as optimizer=AdamW(model.parameters())"
        )
