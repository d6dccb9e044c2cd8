"""Renamed and fused weights of a family, by the library's own mapping from files to parameters.

A file may hold each expert apart, or query, key and value, where the model has one tensor. Which
tensors become which parameter is known from headers. A read takes
of merged experts those in its range, else all that a parameter is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.models.weights import JoinedTensor, Stored

Read = Callable[[Stored], Tensor]


@dataclass(frozen=True)
class Converted(JoinedTensor):
    """A parameter that the library's `converter` makes of several tensors, by source pattern."""

    target: str
    first: str
    sources: Mapping[str, Sequence[Stored]]
    converter: Any
    config: Any
    sizes: ParameterShapes

    def read(self, index: Sequence[slice] | None, read: Read) -> Tensor:
        """The elements at `index`, a range for every dim; all of a tensor of the shape of this one
        without it. `read` reads a whole tensor of a file.
        """
        sources = self.sources
        if index is not None and _merges_experts(self.converter):
            part = range(self.shape[0])[index[0]]
            span = slice(part.start, part.stop)
            sources = {pattern: stored[span] for pattern, stored in sources.items()}
            index = (slice(None), *index[1:])
        tensors = {pattern: [read(one) for one in stored] for pattern, stored in sources.items()}
        whole = self.made(tensors)[self.target]
        return whole if index is None else whole[tuple(index)].contiguous()

    def made(self, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """The parameters that the converter makes of tensors, by name and in the parameters'
        shapes.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, given in tensors.items():
            for tensor in given:
                converter.add_tensor(self.first, pattern, pattern, tensor)
        made = converter.convert(self.first, model=self.sizes, config=self.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


@dataclass(frozen=True)
class ParameterShapes:
    """A stand-in for the model, which some operations ask for the shapes of its parameters."""

    shapes: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> Tensor:
        """A tensor of a parameter's shape [...], without memory."""
        return torch.empty(self.shapes[name], device="meta")


def converted(model: Any, found: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of files by the names of a library's model; those of no parameter as they are."""
    from transformers import conversion_mapping, core_model_loading

    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renaming = [one for one in mapping if isinstance(one, core_model_loading.WeightRenaming)]
    converting = [one for one in mapping if isinstance(one, core_model_loading.WeightConverter)]
    by_pattern = {pattern: one for one in converting for pattern in one.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix or None
    result: dict[str, Stored] = {}
    groups: dict[str, dict[str, list[Stored]]] = {}
    natural = core_model_loading.dot_natural_key
    rename = core_model_loading.rename_source_key
    for key in sorted(found, key=natural):
        name, pattern = rename(key, renaming, converting, prefix, state)
        if name not in state:
            name, pattern = rename(key, [], [], prefix, state)
        if name not in state:
            result[key] = found[key]
        elif pattern is None:
            result[name] = found[key]
        else:
            groups.setdefault(name, {}).setdefault(pattern, []).append(found[key])
    sizes = ParameterShapes({name: tuple(tensor.shape) for name, tensor in state.items()})
    for first, sources in groups.items():
        converter = by_pattern[next(iter(sources))]
        result |= _made_of(first, sources, converter, model.config, sizes)
    return result


def _made_of(
    first: str,
    sources: Mapping[str, list[Stored]],
    converter: Any,
    config: Any,
    sizes: ParameterShapes,
) -> dict[str, Stored]:
    """The parameters that some tensors become, their shapes found without values."""
    one = next(iter(sources.values()))[0]
    whole = Converted(one.file, one.key, (), first, first, sources, converter, config, sizes)
    empty = {pattern: _without_values(tensors) for pattern, tensors in sources.items()}
    return {
        name: Converted(
            one.file, one.key, tuple(made.shape), name, first, sources, converter, config, sizes
        )
        for name, made in whole.made(empty).items()
    }


def _without_values(tensors: Sequence[Stored]) -> list[Tensor]:
    return [torch.empty(stored.shape, device="meta") for stored in tensors]


def _merges_experts(converter: Any) -> bool:
    """Whether the tensors of experts are stacked first, and nothing else moves along that dim."""
    first, *others = converter.operations
    stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0
    return stacks and all(type(one).__name__ == "Concatenate" and one.dim > 0 for one in others)
