"""An engine refuses steps after its caller changed by hand what it was built from.

A plan lays out gradients and optimizer state by which parameters are trained. The engine has an
optimizer of its own. A change of either would move nothing, or only some ranks' parts. Parameters
may be frozen where each of them is updated by itself, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from plait.engine.optimizer_like import Remade
from plait.errors import ModelError
from plait.plan import Plan


class Unchanged:
    """Refuses a step after the caller changed the optimizer, or which parameters are trained."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., object], plan: Plan) -> None:
        # Each parameter is updated by itself, and no stage has learnt which ones have gradients.
        self._may_freeze = plan.dp.strategy == "allreduce" and plan.pp.size == 1
        self._optimizer = optimizer if isinstance(optimizer, Remade) else None
        self._trained = [
            (name, module, key, param.requires_grad)
            for name, module, key, param in _parameters(model)
        ]

    def check(self) -> None:
        """Raise `ModelError` or `OptimizerError` for what is not as it was."""
        if self._optimizer is not None:
            self._optimizer.check_settings()
        for name, module, key, was in self._trained:
            param = module._parameters.get(key)
            if param is None or param.requires_grad == was or (was and self._may_freeze):
                continue
            now = "is frozen now and was trained" if was else "is trained now and was frozen"
            raise ModelError(
                f"the parameter '{name}' {now} when the engine was built, and the plan lays "
                "out gradients and optimizer state by that; call engine.save(path), build an "
                "engine of the changed model, and load the path into it"
            )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, param
