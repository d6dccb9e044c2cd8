"""An engine as a module and an optimizer, which the loop of another library drives.

The module's one parameter stands for the whole gradient: its gradient is as long as the global
norm. So whatever a loop does to gradients (clipping, scaling, zeroing) it does to that one, and the
update follows it. A forward in training runs the whole schedule, backwards included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.loss import MetricSum
from plait.engine.open_step import OpenStep, open_plan
from plait.engine.optimizer_like import like
from plait.engine.update import Update
from plait.errors import ModelError, OptimizerError
from plait.loops.added_losses import AddedLoss, AddedLosses
from plait.loops.calls import Calls
from plait.loops.outputs import collected
from plait.loops.stand_in import direction, factor_of, stand_in
from plait.plan import Plan
from plait.torch_internals import tell_schedulers_of_step
from plait.values import AutogradContext, JsonMapping, JsonObject, PyTree


class ModelOutputs:
    """The outputs of a call: `loss`, and `logits` where nothing is trained.

    Attributes:
        loss: the mean loss of all ranks' samples.
        count: labels of all ranks that the loss counts.
    """

    def __init__(self, loss: Tensor, count: float, logits: Callable[[], Tensor]) -> None:
        self.loss = loss
        self.count = count
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        """Whole outputs [samples here, ...] for this rank's samples. Collective."""
        return self._logits()

    def __getitem__(self, key: str | int) -> PyTree:
        if key in (0, "loss"):
            return self.loss
        if key in (1, "logits"):
            return self.logits
        raise KeyError(key)


class EngineModule(nn.Module):
    """A model under a plan, called as the model itself. Calls are collective.

    Attributes:
        gradient: the parameter [2] that stands for all others, and has no numbers of its own.
        engine: the engine that trains.
    """

    def __init__(self, engine: Engine, calls: Calls, more: Callable[[], bool]) -> None:
        """Drive `engine`; `more` says whether gradients accumulate after a call."""
        super().__init__()
        self.engine = engine
        self.step = OpenStep.of(engine)
        self.gradient = stand_in(engine.world.device)
        self._calls = calls
        self._more = more
        self._losses = AddedLosses()
        self._by_counts = False
        self._awaited: Path | None = None

    def forward(self, *args: PyTree, **named: PyTree) -> ModelOutputs:
        """The loss of a call, which has a gradient while training.

        Raises:
            ModelError: the loop has frozen the parameters.
        """
        batch = self._calls.batch(args, named)
        if self._awaited is not None:
            self.engine.prepare([batch])
            self.engine.load(self._awaited)
            self._awaited = None
        if not (self.training and torch.is_grad_enabled()):
            measured = self.engine.measure(batch)[0]
            return self._outputs(self._number(measured), measured, lambda: self.logits(batch))
        if not self.gradient.requires_grad:
            raise ModelError(
                "the parameters of the prepared model were frozen, and one stands for all of "
                "them; freeze layers of the model before it is prepared, or call it under "
                "torch.no_grad() where it is not trained"
            )
        if self.step.is_summed and self.gradient.grad is None:  # its backward was not called
            self._drop()
        more, by_counts = self._more(), self._by_counts
        measured = self.step.forward_backward(batch, more=more, by_counts=by_counts)
        added = self._losses.add()
        loss = _WholeBackward.apply(self.gradient, self, added, self._number(measured))
        return self._outputs(loss, measured, _no_logits)

    def weigh(self, *, by_counts: bool) -> None:
        """Say how the loop weighs the losses of several calls before one update.

        They have equal weights, or `by_counts` those of the samples or labels that each counts.
        """
        self._by_counts = by_counts

    def train(self, mode: bool = True) -> EngineModule:
        """Put the model in training too, as loops do with what they prepared."""
        if mode:
            self._calls.model.train()
        return super().train(mode)

    def logits(self, batch: PyTree) -> Tensor:
        """Outputs [samples here, ...] for this rank's samples. Collective."""
        return collected(self.engine, batch)

    def _number(self, measured: MetricSum) -> Tensor:
        return torch.tensor(measured.mean, dtype=torch.float32, device=self.gradient.device)

    def _outputs(
        self, loss: Tensor, measured: MetricSum, logits: Callable[[], Tensor]
    ) -> ModelOutputs:
        return ModelOutputs(loss, measured.count, logits)

    def scaled(self, loss: AddedLoss, scale: Tensor) -> Tensor:
        """The gradient [2] that a backward of `scale` (0-dim) times a loss adds."""
        held = self.gradient.grad
        is_zero = held is None or not bool(held.any())
        length = self._losses.scaled(loss, float(scale), self.step.norm, begins=is_zero)
        return direction(scale) * length

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, but those of a forward whose backward is to come."""
        self.gradient.grad = None
        if self._losses.may_forget():
            self._drop()

    def _drop(self) -> None:
        self._losses.drop()
        self.step.drop()

    def update(self) -> bool:
        """One update by the gradient as the loop has left it; whether it was made. Collective.

        Raises:
            ModelError: the gradient was changed to what is no multiple of it. Or the losses of
                several calls had other scales than those by which their gradients were added.
        """
        grad = self.gradient.grad
        if grad is None:
            return False
        norm = self.step.norm
        factor = 1.0
        if math.isfinite(norm):  # else the engine says what is wrong
            self._losses.check(self.step.weights)
            factor = factor_of(grad, direction(grad) * norm)
        made = self.step.update(factor)
        self._losses.drop()
        return made

    def prepare(self, batch: PyTree) -> None:
        """Cut a model that only a batch shows how to cut. Collective."""
        self.engine.prepare([self._calls.batch((), batch)])

    def load_when_cut(self, path: Path) -> None:
        """Load a checkpoint now, or at the next call where a batch must show the cut."""
        if self.engine.is_cut:
            self.engine.load(path)
        else:
            self._awaited = path

    def save_pretrained(self, path: str | Path, **others: object) -> None:
        """Write the library's files; options of the library are not needed. Collective."""
        self.engine.save_pretrained(path)

    def state_dict(self, *args: object, **named: object) -> NoReturn:
        """Refused: no rank has the whole model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "a model under a plan has no state_dict on one rank; write it with "
            "model.save_pretrained(folder) or model.engine.save(folder)"
        )

    def load_state_dict(self, state_dict: JsonMapping, *args: object, **named: object) -> NoReturn:
        """Refused: no rank has the whole model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "a model under a plan loads no state_dict; load it before it is prepared, or call "
            "model.engine.load(folder)"
        )

    @property
    def config(self) -> PyTree:
        """The library's config of the model."""
        return self._calls.model.model.config  # type: ignore[union-attr]


class _WholeBackward(torch.autograd.Function):
    """The backward of a loss whose gradients are computed already."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        gradient: Tensor,
        owner: EngineModule,
        added: AddedLoss,
        loss: Tensor,
    ) -> Tensor:
        ctx.owner = owner
        ctx.added = added
        return loss

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.owner.scaled(ctx.added, grad), None, None, None


def _no_logits() -> Tensor:
    raise ModelError(
        "a training step gives no logits: they are on the last stage alone, sample by sample; "
        "call the model under model.eval() and torch.no_grad()"
    )


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine, as the loop sees it: rates in groups, and a step.

    Attributes:
        optimizer: the loop's own, whose groups a scheduler changes.
        step_was_skipped: the last step updated nothing.
    """

    def __init__(
        self, module: EngineModule, optimizer: torch.optim.Optimizer, acts: Callable[[], bool]
    ) -> None:
        """Follow the groups of `optimizer`; `acts` says whether a step is due."""
        self.module = module
        self.optimizer = optimizer
        self._acts = acts
        self.step_was_skipped = False
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [] if index else [module.gradient]

    @property
    def param_groups(self) -> list[JsonObject]:  # type: ignore[override]
        """The groups of the loop's own optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, PyTree]:  # type: ignore[override]
        """Empty, without a tensor of any shape: the engine keeps the state of its parts."""
        return self.optimizer.state

    @property
    def defaults(self) -> JsonObject:  # type: ignore[override]
        """The defaults of the loop's own optimizer."""
        return self.optimizer.defaults

    def step(  # type: ignore[override]  # torch has one signature for each closure
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """One update with the groups' settings. Collective."""
        loss = None if closure is None else closure()
        if not self._acts():
            return loss
        tell_schedulers_of_step(self.optimizer)
        follow(self.module.engine.update, self.optimizer)
        self.step_was_skipped = not self.module.update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients where a step is due."""
        if self._acts():
            self.module.zero_grad()

    def add_param_group(self, param_group: JsonObject) -> NoReturn:
        """Refused: the engine's optimizer has the parts of all parameters already.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "a group of parameters cannot be added to the optimizer under a plan, which has split "
            "its parameters; give the optimizer all groups before it is prepared, with lr = 0.0 "
            "and weight_decay = 0.0 for those that are to train later"
        )

    def state_dict(self) -> JsonObject:
        """The groups' settings; the moments are saved by slices (`engine.save`)."""
        return {"state": {}, "param_groups": [_settings_of(one) for one in self.param_groups]}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Take the groups' settings; the moments are loaded by slices (`engine.load`)."""
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(_settings_of(saved))

    def train(self) -> None:
        """Nothing to do."""

    def eval(self) -> None:
        """Nothing to do."""


def _settings_of(group: JsonMapping) -> JsonObject:
    """The settings of a group, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def follow(update: Update, loops: torch.optim.Optimizer) -> None:
    """Take the settings of the loop's groups, as a scheduler has left them.

    What a step counts in the engine's groups stays, as the loop's own optimizer makes no step.
    """
    kept = {"params", *update.counts.names}
    for group, told in zip(update.optimizer.param_groups, loops.param_groups, strict=True):
        group.update(
            {key: value for key, value in told.items() if key in group and key not in kept}
        )


def make_module(
    calls: Calls,
    optimizer: torch.optim.Optimizer,
    plan: Plan | str,
    *,
    options: Options | None = None,
    more: Callable[[], bool] = lambda: False,
    acts: Callable[[], bool] = lambda: True,
) -> tuple[EngineModule, EngineOptimizer]:
    """A module and an optimizer that train `calls.model` under a plan. Collective."""
    plan = open_plan(plan)
    make = like(optimizer, calls.model, follows_schedule=True)
    engine = build(calls.model, plan, loss=calls.loss, optimizer=make, options=options)
    module = EngineModule(engine, calls, more)
    return module, EngineOptimizer(module, optimizer, acts)
