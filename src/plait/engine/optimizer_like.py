"""A function that makes optimizers like one that the user made for the whole model.

A rank's parameters are parts of the model's. So the optimizer is rebuilt for them, of its class and
with the settings of its groups.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.group_counts import RATE, RATES
from plait.errors import OptimizerError
from plait.models.parameters import Parameters
from plait.parallel.data import require_apart, require_elementwise
from plait.torch_internals import step_hooks
from plait.values import JsonMapping, JsonObject


def like(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, follows_schedule: bool = False
) -> Remade:
    """The function for `build`.

    Raises `OptimizerError` where the optimizer has been used, or has other parameters than the
    model. So does a schedule of rates that is not followed, and a hook of its steps.
    """
    kind: Any = type(optimizer)
    cure = f"give build a function, optimizer=lambda params: {kind.__name__}(params, ...)"
    if optimizer.state:
        raise OptimizerError(
            f"the {kind.__name__} has made steps already, and its state cannot be split; {cure}"
        )
    if not follows_schedule:
        _refuse_schedule(optimizer)
    _refuse_hooks(optimizer)
    names = _names_of_settings(optimizer)
    settings = [_settings(names, group) for group in optimizer.param_groups]
    marks = [_marks(names, group) for group in optimizer.param_groups]
    group_of = _group_of(optimizer, model)
    missing = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and name not in group_of
    ]
    if missing:
        raise OptimizerError(
            f"the {kind.__name__} leaves out {len(missing)} of the model's parameters, as "
            f"{missing[0]}; freeze them with requires_grad_(False), or {cure}"
        )
    _refuse_others(optimizer, model)
    return Remade(optimizer, settings, marks, group_of, follows_schedule=follows_schedule)


def check_elementwise(
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
    model: nn.Module,
    plan_text: str,
    *,
    keep_dims: bool = False,
) -> None:
    """Raise `OptimizerError` unless the optimizer is elementwise in each of its groups.

    `keep_dims`: its parts are blocks of matrices, as those of a tensor axis.

    An optimizer made again has one parameter in the trial for each group and shape.
    """
    names = _trained(model)
    known = {name: tuple(param.shape) for name, param in model.named_parameters()}
    if isinstance(make_optimizer, Remade):
        kinds = {(make_optimizer.group(name), known.get(name)): name for name in names}
        names = list(kinds.values())
    make = _on_trial(make_optimizer, model, names)
    shapes = [known.get(name, ()) for name in names]
    require_elementwise(make, plan_text, shapes, keep_dims=keep_dims)


def check_apart(
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer], model: nn.Module, plan_text: str
) -> None:
    """Raise `OptimizerError` where the update of a parameter depends on others."""
    names = _trained(model)
    require_apart(_on_trial(make_optimizer, model, names), plan_text, len(names))


def _trained(model: nn.Module) -> list[str]:
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    return names or ["parameter"]


def _on_trial(
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
    model: nn.Module,
    names: Sequence[str],
) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """The function for parameters of a trial, with names and attributes of the model's.

    One that needs whole tensors takes those of the trial for such.
    """
    known = dict(model.named_parameters())
    is_whole = getattr(make_optimizer, "needs_whole", False)
    shapes = {} if is_whole else {name: tuple(param.shape) for name, param in known.items()}

    def make(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        named = list(zip(names, params, strict=True))
        for name, param in named:
            vars(param).update(vars(known[name]) if name in known else {})
        return make_optimizer(Parameters(named, shapes))

    return make


class Remade:
    """Makes optimizers of a rank's parameters, like one that the user made for the whole model."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[JsonObject],
        marks: Sequence[JsonObject],
        group_of: Mapping[str, int],
        *,
        follows_schedule: bool,
    ) -> None:
        self._kind: Any = type(optimizer)
        self._user_made = weakref.ref(optimizer)  # it holds the whole model's parameters
        self._groups = groups
        self._marks = marks
        self._group_of = group_of
        self._follows_schedule = follows_schedule

    def __call__(self, params: Parameters) -> torch.optim.Optimizer:
        """The optimizer of these parameters, which a rank has."""
        members: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for name, param in params.named():
            members[self.group(name)].append(param)
        groups = [
            {"params": own, **settings} for own, settings in zip(members, self._groups, strict=True)
        ]
        try:
            made: torch.optim.Optimizer = self._kind(groups)
        except Exception as error:
            raise OptimizerError(
                f"the {self._kind.__name__} cannot be made again for a rank's parameters, as "
                f"{self._kind.__name__}(groups) raises {type(error).__name__}: {error}; give build "
                "a function that makes it, optimizer=lambda params: ..."
            ) from error
        for group, marks in zip(made.param_groups, self._marks, strict=False):
            for key, value in marks.items():
                group.setdefault(key, value)
        return made

    def group(self, name: str) -> int:
        """The number of the group that a parameter of the model is in."""
        return self._group_of.get(name, 0)

    def check_settings(self) -> None:
        """Raise `OptimizerError` where the user's optimizer has got a schedule, hooks or other
        settings.

        No step is made with it, so that none of them would move anything.
        """
        optimizer = self._user_made()
        if self._follows_schedule or optimizer is None:
            return
        _refuse_schedule(optimizer)
        _refuse_hooks(optimizer)
        pairs = zip(optimizer.param_groups, self._groups, strict=False)
        for index, (now, built) in enumerate(pairs):
            for key, value in built.items():
                if not isinstance(value, Tensor) and now.get(key) != value:
                    raise OptimizerError(
                        f"the {self._kind.__name__} has {key} = {now.get(key)} in group "
                        f"{index}, and had {value} when the engine made its own like it, which "
                        "this does not move; give a rate that changes as "
                        "options=plait.Options(learning_rate=factor_of_step)"
                    )


def _refuse_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(param) for param in model.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    others = [param for param in held if param.requires_grad and id(param) not in known]
    if others:
        raise OptimizerError(
            f"the {type(optimizer).__name__} has {len(others)} parameters that the "
            f"{type(model).__name__} does not have, such as one of shape {list(others[0].shape)}, "
            "and an engine trains those of its model alone; make the module that has them, as that "
            "of the loss, a part of the model, whose forward returns what the loss needs of it; or "
            "give them an optimizer of their own"
        )


def _refuse_schedule(optimizer: torch.optim.Optimizer) -> None:
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise OptimizerError(
            f"the {type(optimizer).__name__} has a schedule of learning rates, which would move "
            "nothing; leave it out and give options=plait.Options(learning_rate=factor_of_step)"
        )


def _refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    if step_hooks(optimizer):
        raise OptimizerError(
            f"the {type(optimizer).__name__} has a hook of its steps, and an engine steps an "
            "optimizer of its own, which would not call it; register it on "
            "engine.update.optimizer, whose parameters are this rank's parts (to clip by a norm "
            "is options=plait.Options(clip_grad_norm=...))"
        )


def _names_of_settings(optimizer: torch.optim.Optimizer) -> set[str]:
    """The settings that the optimizer's constructors take, also those that a class hands on to its
    base as `**kwargs`. Where none is named, groups alone have settings, and all of them count.
    """
    taken: dict[str, inspect.Parameter] = {}
    for kind in type(optimizer).__mro__:
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            taken |= inspect.signature(kind.__init__).parameters
    names = set(taken)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        names |= optimizer.defaults.keys()
    written = {key for group in optimizer.param_groups for key in group} - {"params"}
    of_schedules = RATES - {RATE}
    return (names if names & written else written - of_schedules) - {"params", "param_names"}


def _settings(names: Set[str], group: JsonMapping) -> JsonObject:
    """The settings of a group that the optimizer's constructor takes."""
    return {key: value for key, value in group.items() if key in names}


def _marks(names: Set[str], group: JsonMapping) -> JsonObject:
    """The entries of a group that the user wrote for code of their own, as `lr_scale`.

    A schedule's are left out, as the engine's optimizer has none, and so are names of parameters.
    """
    others = {"params", "param_names", *RATES, *_settings(names, group)}
    return {key: value for key, value in group.items() if key not in others}


def _group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """The group of each of the model's parameters, by name."""
    index_of = {
        id(param): index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    return {
        name: index_of[id(param)]
        for name, param in model.named_parameters()
        if id(param) in index_of
    }
