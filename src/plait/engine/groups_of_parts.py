"""Groups that a function of the parameters makes by their sizes or places.

A rank's parameters are parts, or some of the model's. A function that looks at their `dim()`,
`numel()` or order would give a parameter other settings than it does on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plait.engine.optimizer_like import Remade
from plait.errors import OptimizerError
from plait.models.parameters import Parameters
from plait.parallel.data.elementwise import CURE_OF_GROUPS, group_settings
from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.values import JsonObject

SERVERS = frozenset({"server", "async-server"})
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]


def has_parts(plan: Plan) -> bool:
    """Whether the optimizer of a rank has parts of the parameters, or some of them."""
    serves = plan.dp.size > 1 and plan.dp.strategy in SERVERS
    axes = (plan.pp.size, plan.tp.size, plan.ep)
    return STRATEGIES[plan.dp.strategy].elementwise or serves or max(axes) > 1


class GroupsOfWholes:
    """The settings of each parameter where the function gets all of them, whole."""

    def __init__(self, make_optimizer: MakeOptimizer, model: nn.Module, plan: Plan) -> None:
        """Call the function for tensors without values, where the plan has parts.

        A function that does not take them is not looked at.
        """
        self._plan = plan
        self._settings: dict[str, JsonObject] = {}
        by_name = isinstance(make_optimizer, Remade) or getattr(
            make_optimizer, "needs_whole", False
        )
        if by_name or not has_parts(plan):
            return
        for empty in (_without_memory, _of_one_number):
            named = [
                (name, _like(param, empty(param)))
                for name, param in model.named_parameters()
                if param.requires_grad
            ]
            try:
                self._settings = group_settings(make_optimizer(Parameters(named)), named)
                return
            except Exception:  # a function may read values, or know devices alone
                continue

    def checked(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """The optimizer of a rank's own parameters.

        Raises `OptimizerError` where these have other settings.
        """
        for name, settings in group_settings(optimizer, named).items():
            whole = self._settings.get(name, settings)
            for key in sorted(whole.keys() & settings.keys()):
                if whole[key] != settings[key]:
                    raise OptimizerError(
                        f"the function of optimizer= gives '{name}' {key} = {settings[key]} under "
                        f"{self._plan}, whose ranks have parts of the parameters or some of them, "
                        f"and {key} = {whole[key]} where it gets all of them whole; "
                        f"{CURE_OF_GROUPS}"
                    )
        return optimizer


def _like(param: nn.Parameter, value: Tensor) -> nn.Parameter:
    made = nn.Parameter(value)
    vars(made).update(vars(param))
    return made


def _without_memory(param: nn.Parameter) -> Tensor:
    # `empty_like` would load torch's compiler at the start of each run
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _of_one_number(param: nn.Parameter) -> Tensor:
    """For kernels that ask for a device: one number in memory, in all places."""
    return param.new_zeros(()).expand(param.shape)
