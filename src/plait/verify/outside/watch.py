"""A watch on a training step that nothing is known of: what its optimizers see and leave behind.

Gradients are read by a hook that every torch optimizer calls before its update. Summing, dividing
and clipping have happened by then. Shards of FSDP2 and DTensor are gathered there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from plait.engine.engine import Engine
from plait.torch_internals import in_backward
from plait.values import JsonObject, PyTree
from plait.verify.outside import deepspeed, engines
from plait.verify.outside.modules import Sketches
from plait.verify.record.observation import plain_name, whole
from plait.verify.reference.apart import persistent_buffers

Settings = JsonObject


@dataclass
class ObservedUpdate:
    """One optimizer step on one rank: gradients by name, and the settings of each parameter.

    `updates` counts the optimizer's calls. `stale` are parameters that the optimizer holds and the
    model no longer has. `norms` are (limit, norm) of every clipping.
    """

    grads: dict[str, Tensor | None] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)
    kind: type[Optimizer] | None = None
    updates: int = 0
    stale: list[str] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """The arguments of one call. `is_aside`: it ran without gradients, as an evaluation does."""

    inputs: PyTree
    is_aside: bool


class StepWatch:
    """Hooks for the time of `with watch.on():`; `take()` gives what the last step did."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.roots: list[nn.Module] = []
        self.depth = 0
        self.calls = 0
        self.sketches = Sketches()
        self.zero = deepspeed.ZeroWatch()
        self.engines = engines.EngineWatch()
        self._modules: dict[int, str] = {id(one): name for name, one in model.named_modules()}
        self._of_model: list[Call] = []
        self._of_roots: list[Call] = []
        self._is_aside = False
        self._moved_aside = False
        self._ran: set[int] = set()
        self.update = ObservedUpdate()
        self._tell: Callable[[], None] | None = None
        self._made = {id(p): name for name, p in model.named_parameters()}
        self._kept = [p for _, p in model.named_parameters()]  # an id is of a living object
        self._names = {name for name, _ in model.named_modules() if name}
        self._known = set(self._made.values())
        self._buffers = persistent_buffers(model).keys()
        self._made_buffers = {id(one): name for name, one in model.named_buffers()}
        self._kept_buffers = list(model.buffers())

    @contextmanager
    def on(self) -> Iterator[StepWatch]:
        """Everything torch does in this process is watched."""
        with ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            model = self.model.register_forward_pre_hook(self._called, with_kwargs=True)
            stack.callback(model.remove)
            stack.enter_context(self.zero.on())
            stack.enter_context(self.engines.on())
            modules = [torch.nn.utils, torch.nn.utils.clip_grad]
            if deepspeed.ENGINE in sys.modules:
                modules.append(sys.modules[deepspeed.ENGINE])
            for module in modules:
                clip = self._clipping(module.clip_grad_norm_)
                stack.enter_context(patch.object(module, "clip_grad_norm_", clip))
                if hasattr(module, "clip_grads_with_norm_"):
                    scale = self._scaling(module.clip_grads_with_norm_)
                    stack.enter_context(patch.object(module, "clip_grads_with_norm_", scale))
            yield self

    def tell_updates(self, tell: Callable[[], None]) -> None:
        """Have `tell` called after each update."""
        self._tell = tell

    def take(self) -> ObservedUpdate:
        """The update since the last call."""
        done, self.update = self.update, ObservedUpdate()
        self._of_model = []
        self._of_roots = []
        self._ran = set()
        self.calls = 0
        self.sketches = Sketches()
        return done

    def live(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the model that `make` gave, as they are now."""
        params: dict[str, nn.Parameter] = {}
        for module in (self.model, *self.roots):
            for name, parameter in module.named_parameters():
                known = self._made.get(id(parameter), plain_name(name))
                if known in self._known or module is self.model:
                    params.setdefault(known, parameter)
        return params

    def frozen(self) -> set[str]:
        """The names of parameters that do not train, which an optimizer need not hold."""
        return {name for name, parameter in self.live().items() if not parameter.requires_grad}

    def params(self, names: set[str]) -> dict[str, Tensor]:
        """Whole values [...] of these parameters. Collective where they are sharded."""
        known = {name: value for name, value in self.engines.params().items() if name in names}
        others = {name: value for name, value in self.live().items() if name in names - set(known)}
        return known | {name: _whole(value) for name, value in others.items()}

    def trained_on(self) -> list[PyTree]:
        """The arguments of each call that trains; of the outermost modules where the model never
        runs as a whole.
        """
        calls = self._of_model or self._of_roots
        trained = [one.inputs for one in calls if not one.is_aside]
        return trained or [one.inputs for one in calls]

    def buffers(self) -> dict[str, Tensor]:
        """Copies [...] of the persistent buffers of modules that ran in this step. Collective where
        they are sharded.

        There are none for engines of this library, nor after an evaluation in training mode.
        """
        copies: dict[str, Tensor] = {}
        if self.engines.found or self._moved_aside:
            return copies
        for root in (self.model, *self.roots):
            for path, module in root.named_modules():
                if id(module) not in self._ran:
                    continue
                for key, buffer in module.named_buffers(path, recurse=False):
                    known = self._made_buffers.get(id(buffer), plain_name(key))
                    if known in self._buffers and known not in copies:
                        copies[known] = whole(buffer)
        return copies

    def _enter(self, module: nn.Module, args: PyTree) -> None:
        if self.depth == 0:
            self._is_aside = not torch.is_grad_enabled()
            self._moved_aside |= self._is_aside and module.training
            if module is not self.model and not any(module is root for root in self.roots):
                self.roots.append(module)
                for name, part in module.named_modules():
                    self._modules.setdefault(id(part), plain_name(name))
            self._of_roots.append(Call(args, self._is_aside))
        self.depth += 1

    def _called(self, module: nn.Module, args: PyTree, kwargs: PyTree) -> None:
        self._of_model.append(Call((args, kwargs), self._is_aside))

    def _leave(self, module: nn.Module, args: PyTree, output: PyTree) -> None:
        self.depth = max(self.depth - 1, 0)
        self._ran.add(id(module))
        name = self._modules.get(id(module), "")
        if name in self._names and not in_backward() and not self._is_aside:
            self.sketches.add(name, self.calls, output)
        if self.depth == 0 and not self._is_aside and any(True for _ in module.parameters()):
            self.calls += 1

    def _before_update(
        self, optimizer: Optimizer, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]] | None:
        if _is_wrapper(optimizer):
            return None  # a wrapper: the optimizer inside has its own hook
        self._read(optimizer)
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if given is None:
            return None

        def closure() -> PyTree:  # it may do the last backward: gradients are there after it
            result = given()
            self.update.updates -= 1
            self._read(optimizer)
            return result

        return args[:1], {**kwargs, "closure": closure}

    def _read(self, optimizer: Optimizer) -> None:
        engine = self.engines.of(optimizer)
        if engine is not None:
            self._read_engine(engine, optimizer)
            return
        live = self.live()
        by_id = {id(parameter): name for name, parameter in live.items()}
        update = self.update
        update.kind = type(optimizer)
        update.updates += 1
        for group in optimizer.param_groups:
            settings = _settings_of(group)
            for parameter in group["params"]:
                name = by_id.get(id(parameter))
                if name is None:
                    name = self._made.get(id(parameter))
                    if name is not None and name in live:
                        update.stale.append(name)
                if name is not None:
                    update.settings[name] = settings
        for name, held, grad in self.zero.gradients(optimizer, live):
            update.settings[name] = _settings_of(held)
            update.grads[name] = grad
        update.norms += [pair for pair in self.zero.norms() if pair not in update.norms]
        for name, parameter in live.items():
            if deepspeed.is_sharded(parameter):
                continue
            if name in update.settings or parameter.grad is not None:
                own = parameter.grad
                update.grads[name] = None if own is None else whole(own)

    def _read_engine(self, engine: Engine, optimizer: Optimizer) -> None:
        self.update.kind = type(optimizer)
        self.update.updates += 1
        self.update.grads |= engines.gradients(engine)
        for name, group in engines.settings(engine).items():
            self.update.settings[name] = _settings_of(group)
        self.update.norms += engines.norms(engine)

    def _after_update(self, optimizer: Optimizer, args: PyTree, kwargs: PyTree) -> None:
        if self._tell is not None and not _is_wrapper(optimizer):
            self._tell()

    def _clipping(self, clip: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def clip_grad_norm_(
            parameters: Tensor | Iterable[Tensor], max_norm: float, *args: object, **kwargs: object
        ) -> PyTree:
            norm = clip(parameters, max_norm, *args, **kwargs)
            self.update.norms.append((float(max_norm), float(whole(torch.as_tensor(norm)))))
            return norm

        return clip_grad_norm_

    def _scaling(self, scale: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def clip_grads_with_norm_(
            parameters: Tensor | Iterable[Tensor],
            max_norm: float,
            total_norm: Tensor,
            *args: object,
            **kwargs: object,
        ) -> PyTree:
            result = scale(parameters, max_norm, total_norm, *args, **kwargs)
            self.update.norms.append((float(max_norm), float(whole(total_norm))))
            return result

        return clip_grads_with_norm_


INNER = ("optim", "optimizer", "_optimizer")
"""Where a wrapper keeps the optimizer that does the work."""


def _is_wrapper(optimizer: Optimizer) -> bool:
    return any(isinstance(getattr(optimizer, key, None), Optimizer) for key in INNER)


def _whole(parameter: nn.Parameter) -> Tensor:
    value = deepspeed.whole_parameter(parameter)
    return whole(parameter) if value is None else value


def _settings_of(group: Mapping[str, PyTree]) -> Settings:
    kept = {key: _plain(value) for key, value in group.items() if key != "params"}
    kept.pop("param_names", None)
    return kept


def _plain(value: PyTree) -> PyTree:
    return float(value) if isinstance(value, Tensor) else copy.copy(value)


@contextmanager
def group_is_there() -> Iterator[None]:
    """Let code that starts and ends a process group find the one that is there."""

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    with (
        patch.object(torch.distributed, "init_process_group", nothing),
        patch.object(torch.distributed, "destroy_process_group", nothing),
    ):
        yield
