"""A model's modules replaced by forms that several ranks share: sequences, experts, then layers.

The order matters. Context parallelism replaces attention functions inside modules that tensor
parallelism replaces later. Experts are split before the layers around them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from plait import models
from plait.batch_trees import (
    entries_at,
    is_per_sample,
    map_leaves,
    map_tensors,
    num_rows,
    tensors_of,
)
from plait.comm import World
from plait.engine import compiling, offload, recompute
from plait.engine.balance import routers_of
from plait.engine.batch import accepted, arguments, call
from plait.engine.loss import LossFunction
from plait.engine.options import Options
from plait.engine.stages.cut import (
    Cutting,
    example_inputs,
    in_its_precision,
    is_without_example,
)
from plait.engine.stages.parts_of_layers import guard_parts, refuse_parts
from plait.engine.state.written_tensors import unmoved
from plait.engine.with_experts import expert_groups, placements
from plait.errors import ModelError, NotAvailable, PlanError
from plait.models.derived.table import Table, derive_or_leave
from plait.models.losses import IGNORE, cross_entropy
from plait.parallel import context, data, expert, tensor
from plait.parallel.context import ContextGroup
from plait.parallel.expert import ExpertSplit
from plait.parallel.pipeline.side_effects import attributes_kept
from plait.parallel.tensor import Placement, TensorGroup, TensorSplit
from plait.parallel.tensor.mixed_samples import refuse_mixed_samples
from plait.plan import Plan, TensorAxis
from plait.products import Products
from plait.stateless import call_with, replaced
from plait.values import PyTree


@dataclass(frozen=True)
class SplitModel:
    """The parts that were split over ranks, each None where the plan does not split it."""

    sequence: ContextGroup | None
    experts: ExpertSplit | None
    layers: TensorSplit | None

    @property
    def originals(self) -> dict[str, nn.Module]:
        """Modules that can make whole values, by name; experts are those before either split."""
        originals: dict[str, nn.Module] = {}
        if self.layers is not None:
            originals.update(self.layers.originals)
        if self.experts is not None:
            originals.update(self.experts.originals)
        return originals

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Where the parameters of this rank lie in the whole ones; empty without a split."""
        return placements(self.experts, self.layers)

    @property
    def sequence_parts(self) -> int:
        """The parts of each sequence that have a loss each."""
        if self.sequence is None or self.sequence.whole_outputs:
            return 1
        return self.sequence.axis.size

    def loss(self, function: LossFunction) -> LossFunction:
        """The loss function on this rank's outputs."""
        return self._on_outputs(function, IGNORE if function is cross_entropy else None)

    def measure(self, function: LossFunction) -> LossFunction:
        """Another function of whole outputs, on this rank's."""
        return self._on_outputs(function, None)

    def _on_outputs(self, function: LossFunction, ignore_index: int | None) -> LossFunction:
        if self.layers is not None:
            function = self.layers.loss(function, ignore_index)
        if self.sequence is None or not self.sequence.whole_outputs:
            return function
        return partial(_shared_loss, function, self.sequence.axis.size)


def _shared_loss(
    function: LossFunction, size: int, output: PyTree, targets: PyTree
) -> Tensor | tuple[Tensor, Tensor]:
    """A rank's part of a loss that all `size` ranks compute of equal outputs: their sum is one.

    A mean needs no division: each rank counts its part of the samples.
    """
    loss = function(output, targets)
    if not isinstance(loss, tuple) or len(loss) != 2:
        return loss
    total, count = loss
    if not isinstance(count, int | float | Tensor):
        return loss
    return total / size, torch.as_tensor(count, dtype=torch.float64) / size


def split_model(model: nn.Module, plan: Plan, options: Options, world: World) -> SplitModel:
    """Split a model in place, as far as the plan says. Collective.

    Errors: `ModelError` for a model that was split before.
    """
    refuse_parts(model)
    sequence = _split_sequences(model, plan, options, world)
    experts = expert.apply(model, expert_groups(world)) if plan.ep > 1 else None
    layers = _split_layers(model, plan, options, world)
    if sequence is not None:
        sequence.after_layers()
    split = SplitModel(sequence, experts, layers)
    if layers is not None or experts is not None:
        guard_parts(model, str(plan), split.placements)
    return split


def _split_sequences(
    model: nn.Module, plan: Plan, options: Options, world: World
) -> ContextGroup | None:
    if plan.cp.size == 1:
        return None
    if not has_attention_roles(model, options):
        _check_tensor_mode(model, plan)
        group = context.apply_to_trunk(
            model,
            block_names(model, options.blocks),
            world.axis("cp"),
            plan.cp.strategy,
            partial(call_without_values, model, example_inputs(model, options.cutting)),
            in_stages=plan.pp.size > 1,
        )
        if group.whole_outputs and routers_of(model):
            raise PlanError(
                f"routers count tokens of sequences, and those of a {type(model).__name__} begin "
                f"inside it under {plan.cp}; leave cp out"
            )
        return group
    roles = _roles(model, options)
    named = {}
    for name, _ in model.named_modules():
        role = models.role(name, roles)
        if role is not None:
            named[name] = role
    return context.apply(model, named, world.axis("cp"), plan.cp.strategy)


def rehearse_sequences(model: nn.Module, plan: Plan, options: Options) -> None:
    """Raise what `split_model` would for a model whose sequences cannot be cut; no ranks needed."""
    if has_attention_roles(model, options):
        return
    _check_tensor_mode(model, plan)
    example = example_inputs(model, options.cutting)
    run = partial(call_without_values, model, example)
    blocks = block_names(model, options.blocks)
    context.rehearse(model, blocks, run, plan.cp.strategy, plan.cp.size)


def rehearse_documents(model: nn.Module, options: Options) -> None:
    """Raise `ModelError` for a model in which documents of packed samples see each other."""
    whole = torch.zeros(1, 4, dtype=torch.int64)
    run = partial(call_without_values, model, (whole, whole, whole))
    context.check_documents(model, block_names(model, options.blocks), run)


def _check_tensor_mode(model: nn.Module, plan: Plan) -> None:
    if plan.tp.sequence_parallel or plan.tp.mode != "1d":
        raise PlanError(
            f"{plan.tp} gives each rank a part of what comes to the blocks, and {plan.cp} "
            f"needs it whole in a {type(model).__name__}; use tp{plan.tp.size}:1d"
        )


def has_attention_roles(model: nn.Module, options: Options) -> bool:
    """Whether a table beside the model says which modules are its attention."""
    table = options.roles
    if table is None:
        home = sys.modules.get(type(model).__module__)
        table = getattr(home, "ROLES", None)
    return isinstance(table, Mapping) and "attention" in table.values()


def cuts_unknown_inputs(model: nn.Module, plan: Plan, options: Options) -> bool:
    """Whether sequences or layers are cut, and only a batch shows what the model takes."""
    follows = plan.cp.size > 1 and not has_attention_roles(model, options)
    if not follows and not (splits_layers(plan) and is_without_table(model, options)):
        return False
    return is_without_example(model, options.cutting)


def splits_layers(plan: Plan) -> bool:
    """Whether a plan splits layers, for which it must know what modules mean."""
    return plan.tp.size > 1 or plan.tp.mode != "1d"


def is_without_table(model: nn.Module, options: Options) -> bool:
    """Whether roles come from the dataflow of one forward."""
    return options.roles is None and not models.has_roles(model)


def followed_roles(
    model: nn.Module, cutting: Cutting, size: int, *, is_grid: bool = False
) -> Table:
    """The table for `size` ranks that the dataflow of one forward on an example gives.

    On a grid `size` is its side.
    Raises `ModelError` without an example.
    """
    example = accepted(model, example_inputs(model, cutting))
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def place(leaf: Tensor) -> Tensor:
        return leaf.to("cpu", floats if leaf.is_floating_point() else leaf.dtype)

    with unmoved(model):
        run = lambda: call(model, map_tensors(place, example))  # noqa: E731
        return derive_or_leave(model, run, size, is_grid=is_grid)


def call_without_values(
    model: nn.Module, example: PyTree, make: Callable[[PyTree], PyTree]
) -> PyTree:
    """Call a model on inputs made from the example.

    Its parameters are zeros of one row's memory, on the device of the inputs. Views as complex
    numbers ask for rows that lie in memory. Attributes keep what they held, such as a count of
    calls, or a table that the forward moves.
    """
    inputs = in_its_precision(model, make(accepted(model, example)))
    positional, named = arguments(inputs)
    devices = (tensor.device for tensor in tensors_of(inputs))
    device = next(devices, torch.device("cpu"))

    def zeros(tensor: Tensor) -> Tensor:
        row = torch.zeros(tensor.shape[-1:], dtype=tensor.dtype, device=device)
        return row.expand(tensor.shape)

    with attributes_kept(model):
        return call_with(model, replaced(model, zeros), positional, named)


def _split_layers(
    model: nn.Module, plan: Plan, options: Options, world: World
) -> TensorSplit | None:
    if not splits_layers(plan):
        return None
    products = Products("torch" if plan.compile else options.linear_product, world.paths)
    group = TensorGroup(
        world,
        plan.tp.mode,
        plan.tp.sequence_parallel,
        str(plan.tp),
        products=products,
        wire=options.wire,
    )
    split = tensor.apply(model, _roles(model, options, plan.tp), group)
    if world.rank == 0:
        _warn_of_whole_layers(model, plan.tp, split)
    return split


def _warn_of_whole_layers(model: nn.Module, tp: TensorAxis, split: TensorSplit) -> None:
    """Tell that a tensor axis divides nothing, which saves neither memory nor time."""
    parameters = split.placements.values()
    if tp.mode == "1d" and all(one.local_shape == one.shape for one in parameters):
        warnings.warn(
            f"{tp} divides no layer of a {type(model).__name__}: each of its {tp.size} ranks keeps "
            "every parameter and computes the whole model; say how its layers are divided by "
            f"options=plait.Options(roles={{...}}), or use dp{tp.size}",
            stacklevel=2,
        )


def _roles(model: nn.Module, options: Options, tp: TensorAxis | None = None) -> Mapping[str, str]:
    """The user's table, or the model's own; nothing is derived without a tensor axis."""
    if options.roles is not None:
        return options.roles
    if tp is None:
        return models.roles_for(model, 1)
    is_grid = tp.mode != "1d"
    size = max(tp.q, 2) if is_grid else tp.size
    if is_without_table(model, options):
        table = followed_roles(model, options.cutting, size, is_grid=is_grid)
        if is_grid:
            _check_draws(model, table, options.cutting, tp)
            _check_samples(model, options.cutting, tp)
        return table.roles
    return models.roles_for(model, size, is_grid=is_grid)


def _check_draws(model: nn.Module, table: Table, cutting: Cutting, tp: TensorAxis) -> None:
    """Refuse modules that draw random numbers for samples of which each rank has others.

    What a word meets passes where its first dim alone is that of the samples. One sample is too few
    to tell.
    """
    samples = num_rows(example_inputs(model, cutting)) or 0
    for owner, operation, shape, is_met in table.draws:
        by_samples = samples > 1 and (*shape, 1)[0] % samples == 0 and samples not in shape[1:]
        if not by_samples if is_met else samples in shape:
            kind = type(model.get_submodule(owner)).__name__
            where = f"'{owner}' ({kind})" if owner else f"the forward of {kind}"
            raise NotAvailable(
                f"{where} draws random numbers ({operation}) for its samples, and {tp} gives "
                f"ranks other samples; use tp{tp.size}:1d, or set its dropout or noise to 0"
            )


def _check_samples(model: nn.Module, cutting: Cutting, tp: TensorAxis) -> None:
    """Refuse a forward that compares samples, of which each rank has others."""
    example = example_inputs(model, cutting)
    samples = num_rows(example)

    def run(count: int) -> PyTree:
        def make(leaf: PyTree) -> PyTree:
            if is_per_sample(leaf):
                several = entries_at(leaf, [0] * count) if len(leaf) == samples else leaf
                return map_tensors(lambda one: one.to("meta"), several)
            if not isinstance(leaf, Tensor):
                return leaf
            has_samples = leaf.dim() > 0 and leaf.shape[0] == samples
            shape = (count, *leaf.shape[1:]) if has_samples else leaf.shape
            return torch.zeros(shape, dtype=leaf.dtype, device="meta")

        return call_without_values(model, example, partial(map_leaves, make))

    refuse_mixed_samples(model, run, str(tp))


def block_names(model: nn.Module, pattern: str | None) -> list[str]:
    """The model's repeated blocks: the modules that match `pattern`, or found by structure.

    Raises ModelError for a pattern that matches nothing.
    """
    if pattern is None:
        return data.find_blocks(model)
    blocks = data.match_blocks(model, pattern)
    if not blocks:
        children = ", ".join(name for name, _ in model.named_children())
        raise ModelError(
            f"no module matches blocks = '{pattern}'; the model's children are {children}"
        )
    return blocks


def wrap_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    plan: Plan,
    options: Options,
    world: World,
    *,
    layers: TensorSplit | None,
) -> None:
    """Recompute and compile blocks, as the plan says, and offload what they keep.

    Selective recomputation is part of the compiled graph; full recomputation wraps it. What
    remains is moved to the host.
    """
    words = recompute.words_of(plan, blocks, options.remat)
    selective = [name for name, word in zip(blocks, words, strict=True) if word == "selective"]
    full = [name for name, word in zip(blocks, words, strict=True) if word == "full"]
    recompute.apply(model, selective, "selective", layers)
    if plan.compile:
        compiling.apply(
            model,
            blocks,
            backend=options.compile_backend,
            device=world.device,
            as_one=bool(selective),
        )
    recompute.apply(model, full, "full", layers)
    if options.offload_activations:
        offload.apply(model, blocks, world.device)
