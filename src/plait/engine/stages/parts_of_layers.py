"""A model whose layers are split over ranks says so where a whole model is asked for.

Under `tpN` and `epN` each rank has its part of a layer under the name of the whole. A `state_dict`
would look like that of the model, and no plain model could load it. A second engine would split the
parts once more, and train other numbers.

A layer that was cut is another module then. Code may still hold the one before, or its parameters.
These have no numbers any more, and say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from plait.engine.stages.whole_model import STATE
from plait.errors import ModelError
from plait.parallel.data.absent import Absent, become
from plait.parallel.tensor.placement import Placement


class LayerPartsGuard:
    """A hook of a model that refuses copies of the parts that one rank has."""

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse to copy parts as if they were whole; with `keep_vars` names are asked for.

        Errors: `ModelError`.
        """
        if not keep_vars:
            raise ModelError(
                f"the {type(module).__name__} cannot be read by state_dict() on one rank: "
                f"'{self.plan}' has split its layers, and a rank has parts under the names of "
                f"whole parameters; {STATE}"
            )

    def __deepcopy__(self, memo: object) -> LayerPartsGuard:
        """A copy of the model is split as the model is."""
        return self


class CutIntoParts(Absent):
    """A parameter [...] from before a layer was cut, in whose place the model has a part of it."""

    where = "in parts on several ranks"


def guard_whole_parameters(
    before: Iterable[tuple[str, weakref.ref[nn.Parameter]]], model: nn.Module, plan: str
) -> None:
    """Let parameters from before the split, by name, tell who reads them."""
    still_there = {id(param) for param in model.parameters()}
    for name, ref in before:
        param = ref()
        if param is not None and id(param) not in still_there:
            become(param, CutIntoParts.kind(type(param), partial(_refuse_read, name, plan)))


def _refuse_read(name: str, plan: str, param: Tensor) -> None:
    """Raise `ModelError` for a read of a parameter [...] that the model does not have any more."""
    raise ModelError(
        f"the parameter '{name}' {list(param.shape)} was taken from the model before '{plan}' cut "
        "it, and has no numbers to read, to copy or to change: this rank's part of it is "
        f"model.get_parameter('{name}'), and its layer model.get_submodule(...) of the model that "
        f"was given to build; {STATE}"
    )


def guard_parts(model: nn.Module, plan: str, placements: Mapping[str, Placement]) -> None:
    """Let a model whose layers are split refuse its `state_dict`.

    So does each module in it that has a part of a parameter, by the placements of its parameters.
    """
    cut = [name for name, one in placements.items() if one.local_shape != one.shape]
    holders = {""}
    for name in cut:
        path = name.split(".")
        holders |= {".".join(path[:depth]) for depth in range(1, len(path))}
    for name in holders:
        guarded = model.get_submodule(name)
        guarded.register_state_dict_pre_hook(LayerPartsGuard(plan).before_state_dict)


def has_parts(model: nn.Module) -> bool:
    """Whether this rank has parts of the layers of a model."""
    return _plan_of(model) is not None


def _plan_of(model: nn.Module) -> str | None:
    """The plan by which an engine has split the layers of a model."""
    for module in model.modules():
        for hook in module._state_dict_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, LayerPartsGuard):
                return owner.plan
    return None


def refuse_parts(model: nn.Module) -> None:
    """Raise `ModelError` for a model whose layers an earlier engine has split."""
    plan = _plan_of(model)
    if plan is not None:
        raise ModelError(
            f"the layers of this {type(model).__name__} were split by an engine that was built of "
            f"it before ('{plan}'), and this rank has parts of them alone; make the model once "
            "more, build an engine of it, and engine.load(path) what engine.save(path) of the "
            "first has written"
        )
