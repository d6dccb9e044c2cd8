"""The values of a model: made by name, read from files, or brought along. Each goes to its place on
this rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm import Axis, World
from plait.engine.precision import Precision
from plait.engine.state.init import Initializer, buffer_dtype, is_meta, place_holders
from plait.engine.state.local_parameters import LocalParameters
from plait.engine.state.shards import parameter_shards, sharded_names
from plait.errors import some_of
from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.models.coded import CodedWeight
from plait.models.weights import Reader, Weights, weights_of
from plait.parallel.data import DataStrategy
from plait.parallel.data.gradients import BucketState


class InitialValues:
    """A model whose parameters wait for their memory, and where the values come from."""

    def __init__(
        self,
        model: nn.Module,
        initializer: Initializer | None,
        brought: dict[str, Tensor],
        axis: Axis,
        *,
        kind: Tensor,
        differing: Sequence[str] = (),
        compares: bool = True,
    ) -> None:
        """`brought`: whole values by name. One at a time goes to the device, as those of `kind`.

        `compares`: whether a warning names values that differ between ranks.
        """
        self._name_of = {id(param): name for name, param in model.named_parameters()}
        self._initializer = initializer
        self._brought = brought
        self._axis = axis
        self._kind = kind
        self._weights = weights_of(model) if initializer is not None else None
        self._compares = compares and bool(brought) and axis.size > 1
        self._differing = list(differing)

    def fill(
        self,
        strategies: Mapping[int, DataStrategy],
        holding: LocalParameters,
        coded: Mapping[str, CodedWeight],
    ) -> None:
        """Give every parameter that this rank holds its value. Collective.

        Those of `coded` weights are kept in codes.
        """
        with torch.no_grad():
            self._give_all(strategies, holding, coded)
            if self._weights is not None:
                read_shards(self._weights, strategies, holding)
            for strategy in strategies.values():
                strategy.publish()

    def _give_all(
        self,
        strategies: Mapping[int, DataStrategy],
        holding: LocalParameters,
        coded: Mapping[str, CodedWeight],
    ) -> None:
        """Whole values, one after the other, each cut to what this rank keeps of it."""
        places: dict[str, list[tuple[DataStrategy, BucketState, int]]] = {}
        for strategy in strategies.values():
            for state in (*strategy.states, *strategy.frozen_states):
                for index, slot in enumerate(state.bucket.slots):
                    places.setdefault(slot.name, []).append((strategy, state, index))

        def give(name: str, value: Tensor) -> None:
            if name in coded:
                value = coded[name].encode(value) if name in places else value
            elif name in holding.placements:
                value = holding.placements[name].cut(value)
            for strategy, state, index in places.get(name, ()):
                strategy.load(state, index, value)
            if (
                name not in places and name in holding.params
            ):  # frozen, and not sharded by the strategy
                param = holding.params[name]
                param.data = value.to(param.device, param.dtype, copy=True)
                for same in holding.copies.get(name, ()):  # never updated, so one memory does
                    same.data = param.data

        def take(param: nn.Parameter, value: Tensor) -> None:
            if (
                id(param) in self._name_of
            ):  # else a copy for another stage: its value comes under the name of the first
                give(self._name_of[id(param)], value)

        if self._initializer is not None:
            self._initializer.make(take)
        for name in list(self._brought):
            value = self._brought.pop(name).to(self._kind)
            give(name, self._agreed(name, value.contiguous()))
        if self._weights is not None and coded:
            with self._weights.reading() as reader:
                for name in coded:
                    if name in self._weights and name in places:
                        give(name, reader.read(name))
        self._tell_differences()

    def _agreed(self, name: str, value: Tensor) -> Tensor:
        """The value of the first rank. Collective."""
        if self._axis.size == 1:
            return value
        agreed = value.clone()
        self._axis.broadcast(agreed, 0).wait()
        if not _is_same(agreed, value):
            self._differing.append(name)
        return agreed

    def _tell_differences(self) -> None:
        """Warn where a rank brought other values than the first. Collective."""
        if not self._compares:
            return
        for rank, names in enumerate(self._axis.gather_objects(self._differing)):
            if names and self._axis.rank == 0:
                warnings.warn(
                    f"rank {rank} brought other initial values than rank 0, whose values all ranks "
                    "train: "
                    f"{some_of(names)}; seed every rank alike before the model is made",
                    stacklevel=2,
                )


def read_shards(
    weights: Weights, strategies: Mapping[int, DataStrategy], holding: LocalParameters
) -> None:
    """Read the elements that this rank keeps, and no others, into the memory that has them."""
    _make_frozen(weights, holding, sharded_names(strategies.values()))
    with weights.reading() as reader:
        for shard in parameter_shards(strategies.values(), holding):
            if shard.name in weights:
                shard.fill(lambda box: _read(reader, box))


def _make_frozen(weights: Weights, holding: LocalParameters, sharded: set[str]) -> None:
    """Give the frozen parameters that are read, and their copies on this rank, one memory each."""
    for name, param in holding.params.items():
        if name in weights and not param.requires_grad and name not in sharded:
            param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            for same in holding.copies.get(name, ()):
                same.data = param.data


def _read(reader: Reader, shard: Shard) -> None:
    """Read the values of a shard, rectangle by rectangle."""
    whole = Box.whole(shard.global_shape)
    for rectangle in shard.flat_range.rectangles():
        read = reader.read(shard.name, rectangle.box.within(whole))
        stop = rectangle.position + rectangle.box.numel
        shard.values[rectangle.position : stop].copy_(read.reshape(-1))


@dataclass(frozen=True)
class FullState:
    """The values of a model before its layers are split.

    Attributes:
        values: whole parameters [...] by name; empty for a model on the meta device.
        differing: names of buffers that differed from those of the first rank.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    differing: Sequence[str] = ()

    @staticmethod
    def of(model: nn.Module, world: World) -> FullState:
        """The values of a model that has them, with the buffers of the first rank; none of a meta
        model. Collective.
        """
        if is_meta(model):
            return FullState()
        values = {name: param.data for name, param in model.named_parameters()}
        return FullState(values, differing=_agree_on_buffers(model, world))


def prepare(
    model: nn.Module,
    seed: int,
    precision: Precision,
    *,
    world: World,
    whole: FullState,
    originals: Mapping[str, nn.Module],
    compares: bool = True,
) -> InitialValues:
    """Take the values out of a model, and leave parameters that have the memory of one element.

    `originals` are the modules that can make whole values, where layers are split. `compares` is
    whether a warning names values that differ between ranks.
    """
    axis = world.axis("world")
    dtype = precision.compute
    kind = torch.empty((), dtype=precision.master, device=world.device)
    if is_meta(model):
        place_holders(model, dtype, world.device)
        return InitialValues(
            model,
            Initializer(model, seed, dtype, world.device, originals=originals, axis=axis),
            {},
            axis,
            kind=kind,
        )
    brought = {name: whole.values.pop(name) for name in list(whole.values)}
    for param in model.parameters():
        param.data = torch.zeros((), dtype=dtype, device=world.device).expand(param.shape)
    for original in originals.values():  # kept for what they are, not for their values
        for part in original._parameters.values():
            if part is not None:
                part.data = torch.zeros((), dtype=dtype, device=world.device).expand(part.shape)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(world.device, buffer_dtype(module, key, dtype))
    return InitialValues(
        model, None, brought, axis, kind=kind, differing=whole.differing, compares=compares
    )


def _agree_on_buffers(model: nn.Module, world: World) -> list[str]:
    """Write the buffers of the first rank into those of this rank, and name what was different.
    Collective.
    """
    axis = world.axis("world")
    differing: list[str] = []
    for name, buffer in model.named_buffers() if axis.size > 1 else ():
        own = _dense(buffer.detach())
        agreed = own.to(world.device, copy=True).contiguous()
        axis.broadcast(_as_real(agreed), 0).wait()
        agreed = agreed.to(buffer.device)
        if not _is_same(agreed, own):
            differing.append(name)
            _write(model, name, agreed)
    return differing


def _dense(values: Tensor) -> Tensor:
    """The values with all their zeros, which a sparse tensor leaves out."""
    return values if values.layout is torch.strided else values.to_dense()


def _write(model: nn.Module, name: str, values: Tensor) -> None:
    """Write dense values into a buffer, whose layout stays what it is."""
    buffer = model.get_buffer(name).detach()
    if buffer.layout is torch.strided:
        buffer.copy_(values)
    else:
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = values.to_sparse(layout=buffer.layout)


def _is_same(values: Tensor, others: Tensor) -> bool:
    """Whether two tensors [...] are equal, where what is no number equals itself."""
    if torch.equal(values, others):
        return True
    pair = [one.contiguous().reshape(-1).view(torch.uint8) for one in (values, others)]
    return torch.equal(*pair)


def _as_real(values: Tensor) -> Tensor:
    """The memory of complex numbers as pairs of real ones, which is what ranks can send."""
    return torch.view_as_real(values) if values.is_complex() else values
