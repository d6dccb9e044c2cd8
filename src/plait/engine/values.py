"""The values of a model: made by name, or brought along; each goes to wherever this rank keeps the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm import Axis, World
from plait.data import DataStrategy
from plait.data.gradients import BucketState
from plait.engine.holding import Holding
from plait.engine.init import Initializer, buffer_dtype, is_meta, place_holders


class Values:
    """A model whose parameters wait for their memory, and where the values come from."""

    def __init__(self, model: nn.Module, initializer: Initializer | None, brought: dict[str, Tensor], axis: Axis) -> None:
        self._name_of = {id(param): name for name, param in model.named_parameters()}
        self._initializer, self._brought, self._axis = initializer, brought, axis

    def fill(self, strategies: Mapping[int, DataStrategy], holding: Holding) -> None:
        """Give every parameter that this rank holds its value. Collective where the values were brought along."""
        places: dict[str, list[tuple[DataStrategy, BucketState, int]]] = {}
        for strategy in strategies.values():
            for state in (*strategy.states, *strategy.frozen_states):
                for index, slot in enumerate(state.bucket.slots):
                    places.setdefault(slot.name, []).append((strategy, state, index))

        def give(name: str, value: Tensor) -> None:
            if name in holding.placements:
                value = holding.placements[name].cut(value)
            for strategy, state, index in places.get(name, ()):
                strategy.write(state, index, value)
            if name not in places and name in holding.params:  # frozen, and not sharded by the strategy
                param = holding.params[name]
                param.data = value.to(param.device, param.dtype, copy=True)
                for same in holding.copies.get(name, ()):  # never updated, so one memory does
                    same.data = param.data

        def take(param: nn.Parameter, value: Tensor) -> None:
            if id(param) in self._name_of:  # else a copy for another stage: its value comes under the name of the first
                give(self._name_of[id(param)], value)

        with torch.no_grad():
            if self._initializer is not None:
                self._initializer.run(take)
            for name in list(self._brought):
                value = self._brought.pop(name).contiguous()
                self._axis.broadcast(value, 0).wait()
                give(name, value)
            for strategy in strategies.values():
                strategy.publish()


@dataclass(frozen=True)
class Whole:
    """A model before its layers are split: the values that it has by name, and the modules that can make whole ones."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    originals: Mapping[str, nn.Module] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Whole:
        """Of a model that has its values; nothing of one on the meta device."""
        return Whole({} if is_meta(model) else {name: param.data for name, param in model.named_parameters()})


def prepare(model: nn.Module, seed: int, dtype: torch.dtype, master: torch.dtype, *, world: World, whole: Whole) -> Values:
    """Take the values out of a model, and leave parameters that have the memory of one element."""
    axis = world.axis("world")
    if is_meta(model):
        place_holders(model, dtype, world.device)
        return Values(model, Initializer(model, seed, dtype, world.device, originals=whole.originals), {}, axis)
    brought = {name: value.to(world.device, master) for name, value in whole.values.items()}
    for param in model.parameters():
        param.data = torch.zeros((), dtype=dtype, device=world.device).expand(param.shape)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(world.device, buffer_dtype(module, key, dtype))
    return Values(model, None, brought, axis)
