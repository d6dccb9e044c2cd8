"""Stages of a model that is a chain: modules of which each takes what the one before returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from plait.parallel.pipeline.payload import Payload, pack, unpack
from plait.parallel.pipeline.stage import StageModule

Arguments = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]


class WholeModel(StageModule):
    """The only stage: the model as it is. `arguments(inputs)` are those of its forward."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._model = model
        self._arguments = arguments

    def forward(self, inputs: Any, received: Payload | None) -> Any:
        positional, named = self._arguments(inputs)
        return self._model(*positional, **named)


class ChainStage(StageModule):
    """A run of links. `call(link, inputs)` runs the first link of the model on the model's inputs.

    Inputs that the first link does not take go to every link with such a parameter, as documents of
    packed sequences. They do not travel: each stage has the inputs of its micro-batches.
    """

    def __init__(
        self,
        links: Sequence[tuple[str, nn.Module]],
        call: Callable[[nn.Module, Any], Any],
        *,
        last: bool,
        names: Sequence[str] = (),
        first: nn.Module | None = None,
    ) -> None:
        """`names` of the inputs of the whole model; `first` is its first link."""
        self._links, self._call, self._last, self._names = list(links), call, last, tuple(names)
        self._taken = () if first is None else _parameters(first)
        self._beside = {name: _parameters(link) for name, link in self._links}

    def forward(self, inputs: Any, received: Payload | None) -> Any:
        links, (own, beside) = iter(self._links), self._apart(inputs)
        if received is None:
            value = self._call(next(links)[1], own)
        else:
            received.restore()
            value = unpack(received)
        for name, link in links:
            value = link(value, **{key: beside[key] for key in self._beside[name] if key in beside})
        return value if self._last else pack(value, f"'{self._links[-1][0]}'")

    def _apart(self, inputs: Any) -> tuple[Any, dict[str, Any]]:
        """The inputs of the first link, and those of the others by name."""
        if isinstance(inputs, tuple | list):
            named = dict(zip(self._names, inputs, strict=False))
        elif isinstance(inputs, Mapping):
            named = dict(inputs)
        else:
            return inputs, {}
        beside = {
            name: value
            for name, value in named.items()
            if name in self._names[1:] and name not in self._taken
        }
        if not beside:
            return inputs, {}
        own = tuple(value for name, value in named.items() if name not in beside)
        return own, beside


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of what a module's own forward takes, whatever has been wrapped round it."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]
