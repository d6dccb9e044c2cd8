"""A model says so where `load_state_dict` would fill it, and a rank has parts of it alone.

torch collects an error for each parameter. One sentence says it, with the ways to load.
"""

from __future__ import annotations

from torch import nn

from plait.engine.stages.parts_of_layers import has_parts
from plait.errors import ModelError
from plait.parallel.data.absent import Absent
from plait.plan import Plan


class LoadGuard:
    """A hook of a model that refuses `load_state_dict` on one rank's parts."""

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def __call__(self, module: nn.Module, *given: object) -> None:
        """Refuse whole parameters where this rank has parts. Errors: `ModelError`."""
        if has_parts(module) or any(isinstance(param, Absent) for param in module.parameters()):
            raise ModelError(
                f"load_state_dict cannot fill the {type(module).__name__} on one rank: under "
                f"'{self._plan}' a rank has parts of its parameters; call load_state_dict before "
                "plait.build, or engine.load(path) with what engine.save(path) has written"
            )

    def __deepcopy__(self, memo: object) -> LoadGuard:
        """A copy of the model has the same guard, which looks at the copy."""
        return self


def guard_loading(model: nn.Module, plan: Plan) -> None:
    """Let a model refuse `load_state_dict`; the guard of an earlier engine goes."""
    hooks = model._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(getattr(hook, "hook", None), LoadGuard):
            del hooks[key]
    if plan.world_size > 1:
        model.register_load_state_dict_pre_hook(LoadGuard(str(plan)))
