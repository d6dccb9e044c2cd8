"""An engine's state as pieces of named global tensors, so that any plan can go on from what any plan has saved.

    <name>                     a parameter in master precision, or a buffer
    optimizer/<key>/<name>     what the optimizer keeps of it: `exp_avg`, `exp_avg_sq`, `step` ...

Learning rate, dropout and the order of the data are functions of the step, the seed and the loader's position, which are in
the meta data: there is no other random state to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.checkpoint import Box, Checkpoint
from plait.checkpoint import Piece as SavedPiece
from plait.checkpoint import save as save_pieces
from plait.data import Piece
from plait.engine.axes import data_axis
from plait.engine.parts import LocalPart, local_buffers, local_frozen
from plait.errors import CheckpointError

if TYPE_CHECKING:
    from plait.engine.engine import Engine

OPTIMIZER = "optimizer/"


def save(engine: Engine, path: Path, meta: dict[str, Any]) -> None:
    """Write the checkpoint `path`. Collective."""
    world = engine.world
    average_buffers(engine)
    save_pieces(
        path,
        [*_parameter_pieces(engine), *_optimizer_pieces(engine), *_buffer_pieces(engine)],
        {
            **meta,
            "step": engine.step_index,
            "plan": str(engine.plan),
            "optimizer": type(engine.update.optimizer).__name__,
        },
        rank=world.rank,
        world_size=world.size,
        gather=world.axis("world").gather_objects,
    )


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Fill the engine from the checkpoint `path`; returns its meta data. Collective.

    Errors: `CheckpointError` for a missing or damaged checkpoint, another model or another optimizer; the engine must then
    not be used.
    """
    checkpoint = Checkpoint.open(path)
    _check(engine, checkpoint)
    with torch.no_grad():
        for piece in engine.strategy.pieces:
            checkpoint.fill(_saved(_of_piece(piece, piece.name, piece.value)), convert=True)
            _load_optimizer_state(engine, checkpoint, piece)
        for part in (*local_frozen(engine.strategy, engine.holding), *local_buffers(engine.holding)):
            checkpoint.fill(_saved(part), convert=True)
        engine.strategy.publish()
    engine.step_index = int(checkpoint.meta["step"])
    return checkpoint.meta


def average_buffers(engine: Engine) -> None:
    """Let running statistics, which every rank keeps of its own samples, be the mean over the data axis. Collective."""
    axis = data_axis(engine.world)
    for part in local_buffers(engine.holding):
        if axis.size > 1 and part.value.is_floating_point():
            mean = part.value / axis.size
            axis.all_reduce(mean, control=True).wait()
            part.value.copy_(mean)


def _check(engine: Engine, checkpoint: Checkpoint) -> None:
    here, there = type(engine.update.optimizer).__name__, checkpoint.meta.get("optimizer")
    if there != here:
        raise CheckpointError(f"{checkpoint.directory} was saved with {there} and this run updates with {here}; use {there}")
    wanted = dict(engine.holding.shapes)
    for name in checkpoint.names():
        if name.startswith(OPTIMIZER) and name.split("/", 2)[2] in wanted:
            wanted[name] = checkpoint.global_shape(name)
    checkpoint.check(wanted)


def _parameter_pieces(engine: Engine) -> Iterator[SavedPiece]:
    replicas = engine.strategy.replicas
    for piece in _counted(engine):
        yield _saved(_of_piece(piece, piece.name, piece.value).share(replicas.index, replicas.count))
    frozen_once = not engine.strategy.frozen_states
    for part in local_frozen(engine.strategy, engine.holding):
        axis = data_axis(engine.world)
        if part.name not in engine.holding.secondary:
            yield _saved(part.share(axis.rank, axis.size) if frozen_once else part)


def _buffer_pieces(engine: Engine) -> Iterator[SavedPiece]:
    if data_axis(engine.world).rank == 0:
        yield from (_saved(part) for part in local_buffers(engine.holding) if part.name not in engine.holding.secondary)


def _optimizer_pieces(engine: Engine) -> Iterator[SavedPiece]:
    replicas = engine.strategy.replicas
    for piece in _counted(engine):
        for key, value in engine.update.optimizer.state.get(piece.value, {}).items():
            name = f"{OPTIMIZER}{key}/{piece.name}"
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
            if tensor.shape == piece.value.shape and tensor.dim() > 0:
                yield _saved(_of_piece(piece, name, tensor).share(replicas.index, replicas.count))
            elif tensor.numel() == 1 or piece.part.whole:  # of the parameter as a whole: a count, a factor of a moment
                if piece.part.start == 0 and replicas.index == 0:
                    yield SavedPiece.whole(name, tensor.detach().contiguous())
            else:
                raise CheckpointError(
                    f"the optimizer keeps '{key}' of shape {tuple(tensor.shape)} for {piece.numel} elements of '{piece.name}'; "
                    "it is not known which elements those are, so it cannot be saved"
                )


def _counted(engine: Engine) -> list[Piece]:
    """Without those that another pipeline stage saves."""
    return [piece for piece in engine.strategy.pieces if not engine.strategy.is_secondary(piece)]


def _load_optimizer_state(engine: Engine, checkpoint: Checkpoint, piece: Piece) -> None:
    state: dict[str, Any] = {}
    for name in checkpoint.names():
        prefix, _, rest = name.partition("/")
        key, _, param = rest.partition("/")
        if f"{prefix}/" != OPTIMIZER or param != piece.name:
            continue
        if checkpoint.global_shape(name) == tuple(piece.part.slot.shape) and piece.value.dim() > 0:
            state[key] = torch.zeros_like(piece.value, requires_grad=False)
            checkpoint.fill(_saved(_of_piece(piece, name, state[key])), convert=True)
        else:
            state[key] = checkpoint.tensor(name)
    if state:
        engine.update.optimizer.state[piece.value] = state


def _of_piece(piece: Piece, name: str, tensor: Tensor) -> LocalPart:
    part = piece.part
    return LocalPart(name, tuple(part.slot.shape), part.start, part.stop, tensor.detach().reshape(-1))


def _saved(part: LocalPart) -> SavedPiece:
    return SavedPiece(part.name, part.global_shape, Box.whole(part.global_shape), part.start, part.stop, part.value)
