"""Where a model is cut into stages, by names alone: decided before any parameter has memory.

A model with a chain (modules that compose to the forward) is cut between any two links. Balance is
by estimated cost, unless counts or the first links of the stages are given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from plait.batch_trees import entries_at, is_per_sample, map_leaves, map_tensors
from plait.comm import World
from plait.engine.axes import within_stage
from plait.engine.batch import accepted, call
from plait.engine.explain import (
    example_error,
    explained,
    graph_of_an_example_error,
    inner_gradient_error,
)
from plait.engine.stages.chain import find_chain
from plait.engine.state.written_tensors import unmoved
from plait.errors import ModelError, PlaitError
from plait.origin import batch_norm_error
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.dataflow import Flow, discover
from plait.parallel.pipeline.partition import (
    LayerProfile,
    Partition,
    StageLimits,
    balanced,
    by_counts,
    by_names,
    check_depth,
)
from plait.parallel.pipeline.profile import STATE_COPIES, profile_layers
from plait.parallel.pipeline.simulate import peak_activations
from plait.parallel.tensor.layers import ParallelEmbedding
from plait.values import PyTree

Run: TypeAlias = Callable[[], object]
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Cutting:
    """How a user wants the model cut.

    Attributes:
        counts: links of each stage, or its blocks, where they sum to the number of blocks. Modules
            before and behind the blocks then go with the first and the last stage.
        splits: the first link of each stage but the first; instead of counts.
        chain: patterns of the modules that compose to the forward, where the model's file has no
            `CHAIN`.
        example: inputs of the model, of any batch size.
        measure: balance by each layer's time on the example, not by its estimated work.
        memory_bytes: limit of a stage, if layers are measured. It covers weights, gradients, Adam's
            state and its live micro-batches of activations, of the size of the example.
    """

    counts: tuple[int, ...] | None = None
    splits: tuple[str, ...] | None = None
    chain: tuple[str, ...] | None = None
    example: PyTree = None
    measure: bool = False
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class StagePartition:
    """A model in stages. `links[s]` are the names of the modules that stage s runs; `params[s]` of
    the parameters it uses.
    """

    partition: Partition | None
    links: tuple[tuple[str, ...], ...]
    params: tuple[frozenset[str], ...]
    flow: Flow | None = None  # of a model that is no chain

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each call (or link)."""
        return tuple(stage for stage, links in enumerate(self.links) for _ in links)

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.links)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages use, and which."""
        names = set().union(*self.params)
        return {name: self.holders(name) for name in sorted(names) if len(self.holders(name)) > 1}

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages that use a parameter; several when it is tied across stages."""
        return tuple(stage for stage, names in enumerate(self.params) if name in names)


Agree = Callable[[list[LayerProfile]], list[LayerProfile]]


def cut(
    model: nn.Module,
    blocks: Sequence[str],
    num_stages: int,
    cutting: Cutting,
    *,
    live: Sequence[float] = (),
    agree: Agree = list,
    per_rank: int = 1,
) -> StagePartition:
    """Cut a model (on any device). `live` micro-batches of each stage; `agree` makes measured costs
    the same on every rank; `per_rank` stages are on each.

    Raises ModelError: more stages than layers, counts or splits that do not fit, no cut that fits
    into the memory.
    """
    names = [name for name, _ in model.named_parameters()]
    if num_stages == 1:
        return StagePartition(None, (("",),), (frozenset(names),))
    links = find_chain(model, cutting.chain)
    if not links:
        return _cut_by_flow(
            model, blocks, num_stages, cutting, live=live, agree=agree, per_rank=per_rank
        )
    check_depth(len(links), num_stages, per_rank)
    layers = agree(_weighed(model, links, cutting)) if cutting.measure else _estimated(model, links)
    partition = partition_layers(layers, num_stages, cutting, live, blocks)
    stages = tuple(tuple(links[start:stop]) for start, stop in pairwise(partition.bounds))
    return StagePartition(partition, stages, params_of(model, stages))


def cut_stages(
    model: nn.Module, blocks: Sequence[str], schedule: Schedule, cutting: Cutting, world: World
) -> StagePartition:
    """Cut a model for a schedule. Collective if layers are measured: all ranks take the measurement
    of the first.
    """

    def agree(layers: list[LayerProfile]) -> list[LayerProfile]:
        for axis in (within_stage(world), world.axis("pp")):
            layers = axis.gather_objects(layers)[0]
        return layers

    return cut(
        model,
        blocks,
        schedule.num_stages,
        cutting,
        live=peak_activations(schedule),
        agree=agree,
        per_rank=schedule.num_stages // len(schedule.ranks),
    )


def needs_example(model: nn.Module, cutting: Cutting) -> bool:
    """Whether only a batch shows where the model can be cut into stages."""
    if cutting.example is not None or _takes_tokens(model):
        return False
    return cutting.measure or not find_chain(model, cutting.chain)


def is_without_example(model: nn.Module, cutting: Cutting) -> bool:
    """Whether nothing but a batch shows what the model's inputs look like."""
    return cutting.example is None and not _takes_tokens(model)


def _cut_by_flow(
    model: nn.Module,
    blocks: Sequence[str],
    num_stages: int,
    cutting: Cutting,
    *,
    live: Sequence[float],
    agree: Agree,
    per_rank: int,
) -> StagePartition:
    """Between any two calls of units in the model's own forward, which is run on an example to find
    them.
    """
    flow = _on_example(model, cutting, lambda run: discover(model, blocks, run))
    check_depth(len(flow.calls), num_stages, per_rank)
    layers = (
        agree(_weighed(model, flow.calls, cutting))
        if cutting.measure
        else _estimated(model, flow.calls)
    )
    partition = partition_layers(layers, num_stages, cutting, live, blocks)
    stages = tuple(flow.calls[start:stop] for start, stop in pairwise(partition.bounds))
    bounds = [*pairwise(partition.bounds)]
    glue = [frozenset[str]().union(*flow.weights[start:stop]) for start, stop in bounds[:-1]]
    glue.append(frozenset[str]().union(*flow.weights[bounds[-1][0] :]))
    return StagePartition(partition, stages, params_of(model, stages, glue), flow)


def _num_bytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def _estimated(model: nn.Module, names: Sequence[str]) -> list[LayerProfile]:
    """By the sizes of weights alone; those of one that is called twice are counted where it is
    called first.
    """
    sizes = [_num_bytes(model.get_submodule(name)) for name in names]
    return [
        LayerProfile(
            name, cost(model.get_submodule(name)), STATE_COPIES * size * (name not in names[:index])
        )
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]


def _weighed(model: nn.Module, names: Sequence[str], cutting: Cutting) -> list[LayerProfile]:
    """By what their calls take on the example."""
    units = tuple(dict.fromkeys(names))
    layers = _on_example(model, cutting, lambda run: profile_layers(model, units, run))
    if [layer.name for layer in layers] != list(names):
        raise ModelError(
            "the layers to be measured are not called in their order by the model's forward; leave "
            "measure out"
        )
    return layers


def _on_example(model: nn.Module, cutting: Cutting, see: Callable[[Run], Seen]) -> Seen:
    """The findings of `see` in a forward on the example.

    A forward that refuses it gets the example twice. A batch norm wants two values a channel, and
    `squeeze` drops the dim of a single sample. The slices of training may have more.
    """
    example = in_its_precision(model, accepted(model, example_inputs(model, cutting)))
    explainers = [batch_norm_error(model), inner_gradient_error(model)]
    explainers += [graph_of_an_example_error(example), example_error(model, example)]
    with unmoved(model), explained(*explainers):
        try:
            return see(lambda: call(model, example))
        except PlaitError:
            raise
        except Exception as error:
            twice = map_leaves(_twice, example)
            try:
                return see(lambda: call(model, twice))
            except Exception:
                raise error from None


def _twice(leaf: PyTree) -> PyTree:
    """The samples of a leaf, and then the same again; a leaf without samples stays."""
    if is_per_sample(leaf):
        return entries_at(leaf, [*range(len(leaf))] * 2)
    if isinstance(leaf, Tensor) and leaf.dim() > 0:
        return torch.cat([leaf, leaf])
    return leaf


def in_its_precision(model: nn.Module, inputs: PyTree) -> PyTree:
    """The inputs, whose real tensors [...] have the precision of the model's parameters."""
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return map_tensors(lambda leaf: leaf.to(floats) if leaf.is_floating_point() else leaf, inputs)


def example_inputs(model: nn.Module, cutting: Cutting) -> PyTree:
    """The inputs of one sample: those given, or token numbers for a model that takes nothing else.

    Raises ModelError where there are neither.
    """
    if cutting.example is not None:
        return cutting.example
    if _takes_tokens(model):
        return torch.zeros(1, 4, dtype=torch.int64)
    raise ModelError(
        f"to cut a {type(model).__name__} its forward is run once on an example; give "
        "inputs of one sample as "
        "Options(cutting=Cutting(example=...)), or name a chain of modules that compose to the "
        "forward"
    )


def _takes_tokens(model: nn.Module) -> bool:
    wanted = [
        p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty
    ]
    return [p.name for p in wanted] == ["input_ids"]


def partition_layers(
    layers: Sequence[LayerProfile],
    num_stages: int,
    cutting: Cutting,
    live: Sequence[float] = (),
    blocks: Sequence[str] = (),
) -> Partition:
    """The partition that the user gives, else a balanced one.

    Raises:
        ModelError: both counts and splits are given.
    """
    if cutting.counts is not None and cutting.splits is not None:
        raise ModelError("counts and splits both say where the model is cut; give one of them")
    if cutting.counts is not None:
        _expect(len(cutting.counts), num_stages, "counts are for")
        return by_counts(layers, cutting.counts, frozenset(blocks))
    if cutting.splits is not None:
        _expect(len(cutting.splits) + 1, num_stages, "splits make")
        return by_names(layers, cutting.splits)
    return balanced(
        layers, num_stages, StageLimits(memory_bytes=cutting.memory_bytes, live=tuple(live))
    )


def _expect(given: int, num_stages: int, what: str) -> None:
    if given != num_stages:
        raise ModelError(
            f"the {what} {given} stages and the plan has {num_stages}; give one for each stage"
        )


def params_of(
    model: nn.Module, stages: Sequence[Sequence[str]], glue: Sequence[frozenset[str]] = ()
) -> tuple[frozenset[str], ...]:
    """Names of the parameters of each stage's modules, and of those used between them; the rest is
    the last stage's.
    """
    name_of = {id(param): name for name, param in model.named_parameters()}
    by_stage: list[set[str]] = []
    for stage, links in enumerate(stages):
        names = set(glue[stage]) if glue else set()
        for link in links:
            names |= {name_of[id(param)] for param in model.get_submodule(link).parameters()}
        by_stage.append(names)
    by_stage[-1] |= set(name_of.values()) - set().union(*by_stage)
    return tuple(frozenset(names) for names in by_stage)


def cost(module: nn.Module) -> float:
    """Estimated time of a link: a weight is used once a token, but for tables, which are looked
    up.
    """
    total = 1.0
    for part in module.modules():
        numel = sum(param.numel() for param in part.parameters(recurse=False))
        total += numel * (0.02 if isinstance(part, (nn.Embedding, ParallelEmbedding)) else 1.0)
    return total
