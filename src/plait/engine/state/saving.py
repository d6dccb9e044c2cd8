"""An engine's state as shards of named global tensors, so that any plan can continue from any
other's checkpoint.

    <name>                     a parameter in master precision, or a buffer
    optimizer/<key>/<name>     what the optimizer keeps of it: `exp_avg`, `exp_avg_sq`, `step` ...
    optimizer/group.<key>/<name>   what the optimizer counts in the group of it
    strategy/<key>/<name>      what the data strategy keeps of it: the momentum of an outer step

Learning rate, dropout and data order are functions of the step, the seed and the loader's position.
Those are in the meta data, so there is no other random state to keep.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from plait.checkpoint import Checkpoint
from plait.checkpoint import save as save_shards
from plait.checkpoint.hugging_face import ADAPTER, META
from plait.engine.axes import data_axis
from plait.engine.group_counts import Number
from plait.engine.state.averaging import average_buffers, average_optimizer_state
from plait.engine.state.left_out import warn_of_what_is_left_out
from plait.engine.state.shards import (
    buffer_shards,
    empty_shards,
    frozen_shards,
    optimizer_shards,
    with_decoded,
)
from plait.engine.state.training import TrainingState
from plait.engine.state.trees import TREE, flat, grown, is_tree, require_saveable
from plait.engine.whole_tensors import STATE as WHOLE_STATE
from plait.engine.whole_tensors import WholeOptimizer
from plait.errors import CheckpointError
from plait.mesh import Shard
from plait.models.adapter_files import form_of
from plait.models.adapters import adapted
from plait.models.experts import ExpertWeights
from plait.models.hf import HuggingFace, files_of
from plait.models.packed_experts import has_part
from plait.parallel.data import OptimizerShard, Replicas
from plait.plan.facts import STRATEGIES
from plait.torch_internals import place_state
from plait.values import JsonObject

OPTIMIZER = "optimizer/"
GROUP = "group."
STRATEGY = "strategy/"


def save(state: TrainingState, path: Path, meta: dict[str, object]) -> None:
    """Write the checkpoint `path`; again, without a rank that is lost during it, where others may
    go on. Collective.

    A rank that has come back may be at another save than the others. It takes part in theirs until
    they are at its own. Where they are past its own, it leaves that out.
    """
    state.show_evaluated_weights()
    membership = state.world.membership
    if membership is None:
        state.driver.synchronize()
        _write(state, path, meta)
        return
    while membership.saved_step <= state.step_index:
        state.driver.synchronize()
        step, saved = state.world.together(lambda: _write_first(state, path, meta))
        membership.note_save(step)
        if saved == path:
            return


def _write_first(state: TrainingState, path: Path, meta: dict[str, object]) -> tuple[int, Path]:
    """Write the checkpoint that the first rank wants; its step and path."""
    own = (state.step_index, path)
    wanted: list[tuple[int, Path]] = state.world.axis("world").gather_objects(own)
    _write(state, wanted[0][1], meta)
    return wanted[0]


def _write(state: TrainingState, path: Path, meta: dict[str, object]) -> None:
    world = state.world
    state.loss_modules.warn_of_what_is_left_out()
    average_buffers(state)
    average_optimizer_state(state)
    save_shards(
        path,
        shards_of(state),
        {**meta, **meta_of(state)},
        rank=world.rank,
        world_size=world.size,
        gather=world.axis("world").gather_objects,
    )


def shards_of(state: TrainingState) -> list[Shard]:
    """This rank's share of the model's state."""
    return [*lasting_shards_of(state), *saved_buffers(state)]


def lasting_shards_of(state: TrainingState) -> list[Shard]:
    """The part of its share that changes in an update alone: all but buffers."""
    return [
        *saved_parameters(state, frozen=not adapted(state.model)),
        *_saved_optimizer(state),
        *_saved_strategy(state),
    ]


def meta_of(state: TrainingState) -> JsonObject:
    """The facts of a state that are no tensors."""
    return {**lasting_meta_of(state), **passing_meta_of(state)}


def lasting_meta_of(state: TrainingState) -> JsonObject:
    """The facts that no step changes. They take a walk through all modules."""
    return {**_library_files(state), **_adapter_form(state), "plan": str(state.plan)}


def passing_meta_of(state: TrainingState) -> JsonObject:
    """The facts that a step may change."""
    optimizer = type(state.update.optimizer).__name__
    return {"step": state.step_index, "optimizer": optimizer, **state.scale_state()}


def opened(path: Path, *, is_first: bool) -> Checkpoint:
    """The checkpoint `path`; the first rank says what is to note of it.

    Errors: `CheckpointError` for a missing or damaged one, or one that no engine has saved.
    """
    checkpoint = Checkpoint.open(path)
    if checkpoint.note is not None and is_first:
        print(checkpoint.note, file=sys.stderr, flush=True)
    if "step" not in checkpoint.meta:
        raise CheckpointError(f"{checkpoint.directory} says no step; no engine has saved it")
    return checkpoint


def load_from(state: TrainingState, checkpoint: Checkpoint) -> JsonObject:
    """Fill the engine from an open checkpoint; returns its meta data. Collective.

    Errors: `CheckpointError` for another model or another optimizer; the engine must then not be
    used.
    """
    state.copies.wait()
    _check(state, checkpoint)
    with torch.no_grad():
        for piece, shard in optimizer_shards(state.strategy, state.holding):
            _fill(checkpoint, shard)
            _load_optimizer_state(state, checkpoint, piece, shard)
            for key, tensor in state.driver.extra_state(piece).items():
                if (name := f"{STRATEGY}{key}/{piece.name}") in checkpoint.names():
                    _fill(checkpoint, shard.like(name, tensor))
        for shard in _kept_frozen(state):
            _fill(checkpoint, shard)
        for shard in buffer_shards(state.holding):
            _fill(checkpoint, shard)
        if state.world.membership is None:
            told = state.world.axis("world").gather_objects(state.update.counts.told())
            state.update.counts.take_of_others(told)
        state.strategy.publish()
        state.driver.restart()
    state.resume(checkpoint.meta)
    return checkpoint.meta


def _library_files(state: TrainingState) -> JsonObject:
    """The config of a Hugging Face model, so that its weights load wherever they are taken."""
    if not isinstance(state.model, HuggingFace):
        return {}
    return {META: files_of(state.model)}


def _adapter_form(state: TrainingState) -> JsonObject:
    """The form of the adapters' own files, so that they are written without the model."""
    if not adapted(state.model):
        return {}
    form = form_of(state.model)
    return {ADAPTER: {"config": form.config, "names": form.names}}


def _kept_frozen(state: TrainingState) -> list[Shard]:
    """The frozen parameters that a checkpoint holds: none beside adapters, whose base is where it
    came from.
    """
    return [] if adapted(state.model) else frozen_shards([state.strategy], state.holding)


def _check(state: TrainingState, checkpoint: Checkpoint) -> None:
    here = type(state.update.optimizer).__name__
    there = checkpoint.meta.get("optimizer")
    if there != here:
        raise CheckpointError(
            f"{checkpoint.directory} was saved with {there} and this run updates with {here}; use "
            f"{there}"
        )
    shapes = dict(state.holding.shapes)
    if adapted(state.model):
        for name, param in state.model.named_parameters():
            if not param.requires_grad:
                del shapes[name]
    for name in checkpoint.names():
        if name.startswith((OPTIMIZER, STRATEGY)) and name.split("/", 2)[-1] in shapes:
            shapes[name] = checkpoint.global_shape(name)
    checkpoint.check(shapes)


def saved_parameters(state: TrainingState, *, frozen: bool = True) -> Iterator[Shard]:
    """The shards of parameters that this rank saves; the trained alone without `frozen`."""
    for piece, shard in _counted(state):
        yield from _share(state, piece.name, shard, piece.replicas)
    yield from empty_shards(state.holding)
    if not frozen:
        return
    for shard in with_decoded([state.strategy], state.holding):
        if shard.name not in state.holding.tied_copies:
            yield from _share(state, shard.name, shard, _frozen_replicas(state, shard.name))


def _frozen_replicas(state: TrainingState, name: str) -> Replicas:
    """The ranks of the data axis that hold the same elements of a frozen parameter."""
    if STRATEGIES[state.plan.dp.strategy].shards_parameters:
        return Replicas(1, 0)
    is_expert = state.plan.ep > 1 and _is_expert(state.model, name)
    axis = state.world.axis("edp") if is_expert else data_axis(state.world)
    return Replicas(axis.size, axis.rank)


def _is_expert(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to experts, of which a rank has a part."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    return isinstance(module, ExpertWeights) or has_part(module, key)


def saved_buffers(state: TrainingState) -> Iterator[Shard]:
    """The shards of buffers that this rank saves."""
    if data_axis(state.world).rank == state.world.axis("tp").rank == 0:
        for shard in buffer_shards(state.holding):
            if shard.name not in state.holding.tied_copies:
                yield shard


def _saved_optimizer(state: TrainingState) -> Iterator[Shard]:
    warn_of_what_is_left_out(state.update.optimizer, state.update.own_counts)
    for piece, shard in _counted(state):
        replicas = piece.replicas
        for key, tensor in _kept_by_optimizer(state, piece):
            name = f"{OPTIMIZER}{key}/{piece.name}"
            if key.startswith(WHOLE_STATE):
                if _saves_whole(state, piece, shard, key):
                    yield Shard.whole(name, tensor.detach().contiguous())
            elif tensor.shape == piece.value.shape and tensor.dim() > 0:
                yield from _share(state, piece.name, shard.like(name, tensor), replicas)
            elif (
                tensor.numel() == 1 or piece.part.whole
            ):  # of the parameter as a whole: a count, a factor of a moment
                if replicas.index == 0 and _is_first(state, shard):
                    yield Shard.whole(name, tensor.detach().contiguous())
            else:
                raise CheckpointError(
                    f"the optimizer keeps '{key}' of shape {tuple(tensor.shape)} for {piece.numel} "
                    f"elements of '{piece.name}'; "
                    "it is not known which elements those are, so it cannot be saved"
                )


def _kept_by_optimizer(state: TrainingState, piece: OptimizerShard) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state of a parameter and counts of its group, by name; numbers as tensors."""
    kept = state.update.optimizer.state.get(piece.value, {})
    trees = {key: one for key, one in kept.items() if is_tree(one)}
    leaves = {f"{TREE}{way}": leaf for way, leaf in flat(trees).items()}
    for key, value in {**kept, **leaves}.items():
        if key in trees:
            continue
        require_saveable(key, value)
        is_tensor = isinstance(value, Tensor)
        yield key, value if is_tensor else torch.tensor(float(value), dtype=torch.float64)
    for key, number in state.update.counts.of(piece.value).items():
        dtype = torch.float64 if isinstance(number, float) else None
        yield f"{GROUP}{key}", torch.tensor(number, dtype=dtype)


def _counted(state: TrainingState) -> Iterator[tuple[OptimizerShard, Shard]]:
    """The optimizer's shards, without those that another pipeline stage saves."""
    for piece, shard in optimizer_shards(state.strategy, state.holding):
        if not piece.is_tied_copy:
            yield piece, shard


def _saved_strategy(state: TrainingState) -> Iterator[Shard]:
    replicas = state.strategy.replicas
    for piece, shard in _counted(state):
        for key, tensor in state.driver.extra_state(piece).items():
            kept = shard.like(f"{STRATEGY}{key}/{piece.name}", tensor)
            yield from _share(state, piece.name, kept, replicas)


def _load_optimizer_state(
    state: TrainingState, checkpoint: Checkpoint, piece: OptimizerShard, shard: Shard
) -> None:
    moments: JsonObject = {}
    counts: dict[str, Number] = {}
    whole: dict[str, str] = {}
    for name in checkpoint.names():
        prefix, _, rest = name.partition("/")
        key, _, param = rest.partition("/")
        if f"{prefix}/" != OPTIMIZER or param != piece.name:
            continue
        if key.startswith(WHOLE_STATE):
            whole[key] = name
        elif key.startswith(GROUP):
            counts[key.removeprefix(GROUP)] = checkpoint.tensor(name).item()
        elif (
            checkpoint.global_shape(name) == state.holding.shapes[piece.name]
            and piece.value.dim() > 0
        ):
            saved = checkpoint.dtype(name)  # a mask stays one
            dtype = piece.value.dtype if saved.is_floating_point else saved
            moments[key] = torch.zeros_like(piece.value, dtype=dtype, requires_grad=False)
            _fill(checkpoint, shard.like(name, moments[key]))
        else:
            moments[key] = place_state(checkpoint.tensor(name), piece.value, state.update.optimizer)
    state.update.counts.take(piece.value, counts)
    leaves = {key: moments.pop(key) for key in list(moments) if key.startswith(TREE)}
    moments |= grown({key.removeprefix(TREE): leaf for key, leaf in leaves.items()})
    optimizer = state.update.optimizer
    if isinstance(optimizer, WholeOptimizer):
        optimizer.take(piece.value, lambda key: checkpoint.tensor(whole[key]), whole)
    elif moments:
        optimizer.state[piece.value] = moments
    else:  # saved before the first update
        optimizer.state.pop(piece.value, None)


def _saves_whole(state: TrainingState, piece: OptimizerShard, shard: Shard, key: str) -> bool:
    """Whether this rank saves what an optimizer of whole tensors keeps of one."""
    optimizer = state.update.optimizer
    if isinstance(optimizer, WholeOptimizer) and optimizer.shares:
        return optimizer.is_saved(piece.value, key)
    return piece.replicas.index == 0 and _is_first(state, shard)


def _is_first(state: TrainingState, shard: Shard) -> bool:
    """Whether this rank has the first elements of a parameter, and the first copy of them."""
    is_first_copy = state.holding.replicas(shard.name).index == 0
    return is_first_copy and shard.start == 0 and not any(shard.box.offset)


def _share(state: TrainingState, param: str, shard: Shard, replicas: Replicas) -> Iterator[Shard]:
    """This rank's share in writing a shard of `param` that several ranks hold.

    They are the copies on the tensor axis times the replicas on the data axis.
    """
    copies = state.holding.replicas(param)
    index = replicas.index * copies.count + copies.index
    yield from shard.share(index, replicas.count * copies.count).boxed()


def _fill(checkpoint: Checkpoint, shard: Shard) -> None:
    shard.fill(lambda box: checkpoint.fill(box, convert=True))
