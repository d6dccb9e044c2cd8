"""Parameters by name: the same start under every plan.

A parameter's values come from a generator seeded by the *name* of the module that owns it. Neither
order nor rank nor stage matters. They are made one module at a time and cut at once, so no rank
ever holds the whole model. A model that knows its saved values (`models.weights`) gets those
instead. One that can make them itself (`make_start`) gets its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.engine.seeds import derive_seed
from plait.engine.state.start import make_start, told_start
from plait.errors import ModelError, some_of
from plait.models.adapters import magnitudes, row_norms
from plait.models.weights import MakeStart, start_of, weights_of
from plait.random_state import drawn_alone

TakeValue = Callable[[nn.Parameter, Tensor], None]


def is_meta(model: nn.Module) -> bool:
    """Whether the model has no values yet. A model that has some and lacks others is refused.

    Raises:
        ModelError: some of its tensors have values, and others have none.
    """
    metas = {name: tensor.is_meta for name, tensor in _tensors(model)}
    if any(metas.values()) and not all(metas.values()):
        values = [name for name, meta in metas.items() if not meta]
        raise ModelError(
            f"{some_of(values)} of a model on the meta device have values, and "
            f"{len(metas) - len(values)} "
            "tensors have none; make the model wholly on the CPU, or move those parts there with "
            'module.to("meta")'
        )
    return any(metas.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer is not None)


def place_holders(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace every meta parameter by one of the same shape that takes the memory of a single
    element.

    Shared parameters stay shared. A strategy then points `.data` at the memory that it owns.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in replaced:
                element = torch.zeros(
                    (), dtype=dtype if param.is_floating_point() else param.dtype, device=device
                )
                replaced[id(param)] = nn.Parameter(
                    element.expand(param.shape), requires_grad=param.requires_grad
                )
                vars(replaced[id(param)]).update(vars(param))
            module._parameters[name] = replaced[id(param)]


class Initializer:
    """Makes the values of a meta model, module by module, in the order of the module tree."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        originals: Mapping[str, nn.Module] | None = None,
        axis: Axis | None = None,
    ) -> None:
        """`originals`, by name: modules that stand for those of the model which hold parts; values
        are made whole by them. `axis`: the ranks among which the first makes a start by itself.
        """
        self._model = model
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._originals, self._weights = originals or {}, weights_of(model)
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._start, self._axis = start_of(model), axis
        self._magnitudes = {
            weight: found
            for weight, found in magnitudes(model).items()
            if self._weights is None or found[0] not in self._weights
        }

    def run(self, take: TakeValue) -> None:
        """Call `take(param, full value)` for each parameter once (the first owner's value), and
        fill the buffers.
        """
        self.make(take)
        if self._weights is None:
            return
        take = self._with_norms(take)
        with self._weights.reading() as reader:
            for name, param in self._model.named_parameters():
                if name in self._weights:
                    take(param, self._wide(reader.read(name)))

    def _wide(self, value: Tensor) -> Tensor:
        """In the precision of masters."""
        if not value.is_floating_point():
            return value
        return value.to(torch.float64 if self._dtype == torch.float64 else torch.float32)

    def make(self, take: TakeValue) -> None:
        """Initialise the parameters whose values are not saved."""
        take = self._with_norms(take)
        with_values = {
            param
            for param, name in self._names.items()
            if self._weights is not None and name in self._weights
        }
        placed: set[str] = set()
        if self._start is not None:
            placed = self._take_start(self._start, take)
            with_values |= {param for param, name in self._names.items() if name in placed}
        for name, module in self._model.named_modules():
            params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            buffers = dict(module.named_buffers(recurse=False))
            prefix = f"{name}." if name else ""
            known = all(f"{prefix}{key}" in placed for key in buffers)
            if not known or any(id(param) not in with_values for param in params.values()):
                values = self._values_of(name, module, params, buffers)
                for key, param in params.items():
                    if id(param) not in with_values:
                        with_values.add(id(param))
                        take(param, values[key])

    def _with_norms(self, take: TakeValue) -> TakeValue:
        """`take`, where the norms of a weight's rows are the magnitude that trains beside it."""
        if not self._magnitudes:
            return take
        params = dict(self._model.named_parameters())
        derived = {id(params[name]) for name, _ in self._magnitudes.values()}

        def take_both(param: nn.Parameter, value: Tensor) -> None:
            if id(param) in derived:
                return
            take(param, value)
            name = self._names.get(id(param), "")
            if name in self._magnitudes:
                magnitude, transposed = self._magnitudes[name]
                take(params[magnitude], row_norms(value, transposed))

        return take_both

    def _take_start(self, start: MakeStart, take: TakeValue) -> set[str]:
        """The values that the model makes by itself; buffers go where the modules look for them.

        Returns the names of both. What was added to the model since is initialised by its name.
        """
        named_values: Iterable[tuple[str, Tensor]]
        if self._axis is None:
            named_values = make_start(start, self._seed).items()
        else:
            named_values = told_start(start, self._seed, self._axis, self._device)
        params = dict(self._model.named_parameters())
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        placed = set()
        for name, value in named_values:
            placed.add(name)
            if name in params:
                take(params[name], self._wide(value))
            elif name in buffers:
                self._place_buffer(name, value)
        return placed

    def _place_buffer(self, name: str, value: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        module = self._model.get_submodule(owner)
        module._buffers[key] = value
        module._buffers[key] = value.to(self._device, buffer_dtype(module, key, self._dtype))

    def _values_of(
        self,
        name: str,
        module: nn.Module,
        params: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """From the module itself, or from the whole one that stands for it."""
        whole = self._originals.get(name)
        if whole is None:
            return self._values(name, module, params, buffers)
        return self._values(
            name, whole, {key: p for key, p in whole._parameters.items() if p is not None}, buffers
        )

    def _values(
        self,
        name: str,
        module: nn.Module,
        params: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run the module's own `reset_parameters` on fresh float32 memory, seeded by the module's
        name.
        """
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ModelError(
                f"module '{name or type(module).__name__}' ({type(module).__name__}) owns "
                f"{', '.join([*params, *buffers])} but has no reset_parameters(), so it cannot be "
                "initialised from the "
                "meta device; add that method, or pass the model with its values"
            )
        dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        scratch = {
            key: nn.Parameter(
                _unwritten(param, dtype),
                requires_grad=param.requires_grad and param.is_floating_point(),
            )
            for key, param in params.items()
        }
        for key, buffer in buffers.items():
            module._buffers[key] = torch.zeros(
                buffer.shape, dtype=dtype if buffer.is_floating_point() else buffer.dtype
            )
        for key, fresh in scratch.items():
            module._parameters[key] = fresh
        try:
            seed = derive_seed(self._seed, "parameters", name)
            with drawn_alone(seed), torch.no_grad(), torch.device("cpu"):
                reset()
            values = {key: fresh.detach() for key, fresh in scratch.items()}
            _check_written(name, module, values)
        finally:
            for key, param in params.items():
                module._parameters[key] = param
        self._place_buffers(module)
        return values

    def _place_buffers(self, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(
                    self._device, buffer_dtype(module, key, self._dtype)
                )


def _unwritten(param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """New memory of a parameter's shape: all NaN, so that elements never written are seen."""
    if not param.is_floating_point():
        return torch.zeros(param.shape, dtype=param.dtype)
    return torch.full(param.shape, math.nan, dtype=dtype)


def _check_written(name: str, module: nn.Module, values: Mapping[str, Tensor]) -> None:
    unwritten = [
        key for key, value in values.items() if value.is_floating_point() and value.isnan().any()
    ]
    if unwritten:
        raise ModelError(
            f"reset_parameters() of module '{name or type(module).__name__}' "
            f"({type(module).__name__}) leaves "
            f"{', '.join(unwritten)} without values; write all of them there, or pass the model "
            "with its values"
        )


def buffer_dtype(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """The run's precision for state (running statistics), at least float32 for tables (rotary
    frequencies).

    A module says by `WIDE_BUFFERS` which of its persistent buffers bf16 would not do for.
    """
    buffer = module._buffers[name]
    assert buffer is not None
    if not buffer.is_floating_point():
        return buffer.dtype
    wide = name in module._non_persistent_buffers_set or name in getattr(module, "WIDE_BUFFERS", ())
    if wide and dtype != torch.float64:
        return torch.float32
    return dtype
