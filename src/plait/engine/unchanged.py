"""An engine refuses steps after its caller changed by hand what it was built from.

A plan lays out gradients and optimizer state by which parameters are trained. The engine has an
optimizer of its own. A change of either would move nothing, or only some ranks' parts. Parameters
may be frozen where each of them is updated by itself, as on one device.

The update writes into the memory that parameters had when the engine was built. A parameter that is
put in the place of another, or has other memory, would compute and never be trained. Where masters
are apart from what layers compute with, the next update would undo what a caller wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from plait.engine.optimizer_like import Remade
from plait.engine.precision import Precision
from plait.errors import ModelError
from plait.plan import Plan
from plait.plan.facts import SCHEDULES
from plait.torch_internals import storage_of

_BUILT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each parameter, the engine that was built of it last, as its `Unchanged`'s mark."""

CURE = "call engine.save(path), build an engine of the changed model, and load the path into it"


def is_of_an_engine(param: nn.Parameter) -> bool:
    """Whether an engine was built of a parameter [...]."""
    return param in _BUILT


class Unchanged:
    """Refuses a step after the caller changed the optimizer, which parameters are trained, or where
    they lie.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., object],
        plan: Plan,
        precision: Precision,
    ) -> None:
        # Each parameter is updated by itself, and no stage has learnt which ones have gradients.
        self._may_freeze = plan.dp.strategy == "allreduce" and plan.pp.size == 1
        self._optimizer = optimizer if isinstance(optimizer, Remade) else None
        self._trained = [
            (name, module, key, param, param.requires_grad)
            for name, module, key, param in _parameters(model)
        ]
        self._children = [
            (f"{prefix}." if prefix else "", module, dict(module._modules))
            for prefix, module in model.named_modules()
        ]
        self._known = {id(param) for _, _, _, param, _ in self._trained}
        self._mark = object()
        for _, _, _, param, _ in self._trained:
            _BUILT[param] = self._mark
        stays = not (plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].asynchronous)
        self._has_masters = (
            precision.compute != precision.master
            or plan.dp.offload
            or plan.dp.strategy == "async-server"
        )
        with torch._C.DisableTorchFunctionSubclass():
            self._memory = [
                (name, param, storage_of(param), param._version)
                for name, _, _, param, trains in self._trained
                if trains and stays
            ]

    def check(self) -> None:
        """Raise `ModelError` or `OptimizerError` for what is not as it was."""
        if self._optimizer is not None:
            self._optimizer.check_settings()
        with torch._C.DisableTorchFunctionSubclass():
            self._check_modules()
            self._check_trained()
            self._check_memory()

    def _check_trained(self) -> None:
        for name, module, key, known, was in self._trained:
            param = module._parameters.get(key)
            if param is None:
                continue
            if param is not known:
                raise _replaced(f"the parameter '{name}' is another one now than")
            if param.requires_grad == was or (was and self._may_freeze):
                continue
            now = "is frozen now and was trained" if was else "is trained now and was frozen"
            raise ModelError(
                f"the parameter '{name}' {now} when the engine was built, and the plan lays "
                f"out gradients and optimizer state by that; {CURE}"
            )

    def _check_modules(self) -> None:
        for prefix, module, children in self._children:
            if module._modules == children:
                continue
            for key, child in module._modules.items():
                if child is None or child is children.get(key):
                    continue
                # A wrapper of what was there before, as torch.compile makes, has its parameters.
                if any(id(param) not in self._known for param in child.parameters()):
                    raise _replaced(f"the module '{prefix}{key}' was not in the model")

    def _check_memory(self) -> None:
        for name, param, storage, version in self._memory:
            if storage_of(param) != storage and _BUILT[param] is not self._mark:
                raise ModelError(
                    f"another engine was built of the parameter '{name}' after this one, and has "
                    "put it into memory of its own, where this engine would not train it; give "
                    "each engine modules of its own, as copy.deepcopy(module) before plait.build "
                    "makes them, and where one needs the numbers of the other, write them by "
                    "param.copy_(values) under torch.no_grad()"
                )
            if storage_of(param) != storage:
                raise ModelError(
                    f"the parameter '{name}' has other memory now than the engine updates, as "
                    "param.data = values, model.to(dtype) or load_state_dict(assign=True) give "
                    "it, and would not be trained any more; write numbers into the old memory by "
                    "param.copy_(values) under torch.no_grad(), or change the model before "
                    "plait.build"
                )
            if self._has_masters and param._version != version:
                raise ModelError(
                    f"the parameter '{name}' was written after the engine was built, as "
                    "load_state_dict does, and the next update would undo that: it begins from "
                    "masters apart from the parameters that layers compute with; write before "
                    "plait.build, or give the numbers to the engine by engine.load(path) instead"
                )


def _replaced(what: str) -> ModelError:
    return ModelError(
        f"{what} when the engine was built, whose optimizer does not know it, so it would compute "
        f"and never be trained or saved; {CURE}"
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, param
