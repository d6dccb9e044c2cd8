"""Save: every rank writes its shards, and the whole becomes visible at once or not at all.

    agree      every rank tells what it holds; all see the same, so all refuse alike
    write      each rank one file in <directory>.tmp-<id>/, made durable, with this save's token
    complete   rank 0 writes checkpoint.json, the list of what must be there, with the same token
    publish    rank 0 renames the folder to its name, then lets `latest` name it

Whatever kills it before `publish` leaves the checkpoint before it as it was. A rank that fails
tells the others, so that none waits for it.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from plait.checkpoint.agreement import Agreement, listed
from plait.checkpoint.entry import entry_of
from plait.checkpoint.exchange import exchange
from plait.checkpoint.file import Declared, Do, FileWriter, call, file_order, format_name
from plait.checkpoint.folder import (
    LATEST,
    step_number,
    sync_directory,
    write_index,
    write_text_atomic,
)
from plait.checkpoint.token import KEY, digest, token_of
from plait.errors import CheckpointError, SaveFailed
from plait.mesh import Shard
from plait.values import JsonObject, JsonValue, PyTree

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
Gather = Callable[[PyTree], list[PyTree]]  # what every rank gives, by rank, to every rank


def save(
    directory: str | Path,
    shards: Iterable[Shard],
    meta: JsonObject,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather | None = None,
) -> Path:
    """Save the shards of all ranks as the checkpoint `directory`. A collective call; returns the
    directory.

    Every element of every tensor named must be in some rank's shards. Of elements in several shards
    one is loaded, since replicas agree; so replicas need not pass theirs. `meta` is JSON (step,
    plan text, config, loader and scheduler state, seeds); rank 0's is kept. `gather` is
    `Axis.gather_objects` of the world; one rank needs none. A directory named `step-N` becomes the
    folder's `latest`.

    Raises:
        CheckpointError: on every rank alike: shards that disagree or do not cover a tensor, a
            `meta` that is not JSON.
        SaveFailed: on every rank alike, when one could not write (a full disk, a missing folder).
            The message names the rank and its reason.
    """
    gather = gather or (lambda item: [item])
    prepared = prepare(directory, shards, meta, rank=rank, world_size=world_size, gather=gather)
    temporary = prepared.temporary
    final = prepared.final
    written = gather(attempt(write_own_file, prepared))
    if any(isinstance(one, WriteFailure) for one in written):
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        _stop_if_failed(final, written)
    _stop_if_failed(final, gather(attempt(complete, prepared, written) if rank == 0 else None))
    return final


@dataclass(frozen=True)
class Prepared:
    """A save on which all ranks have agreed, before any of them writes.

    `held` are the shards of this rank, `tensors` is the index of those of all.
    """

    final: Path
    temporary: Path
    token: str
    held: list[Shard]
    meta: JsonObject
    tensors: JsonObject
    rank: int
    world_size: int


def prepare(
    directory: str | Path,
    shards: Iterable[Shard],
    meta: JsonObject,
    *,
    rank: int,
    world_size: int,
    gather: Gather,
) -> Prepared:
    """Agree on a save, and make its folder. Collective. Errors: those of `save`."""
    final = Path(directory).absolute()
    known = Agreement()
    distinct, entries = known.look_at(shards)
    failure = attempt(check_meta, meta) if rank == 0 else None
    hold = _Hold(secrets.token_hex(6), entries, failure)
    holds: list[_Hold] = gather(hold)
    _stop_if_failed(final, [one.failure for one in holds])
    known.learn(rank, [one.entries for one in holds])
    temporary = final.with_name(f"{final.name}.tmp-{holds[0].token}")

    def make_folder() -> str:
        _make_folder(temporary, final)
        return token_of_save(holds[0].token, meta, known)

    made = gather(attempt(make_folder) if rank == 0 else None)
    _stop_if_failed(final, made)
    return Prepared(final, temporary, made[0], distinct, meta, known.tensors, rank, world_size)


def token_of_save(random: str, meta: JsonObject, agreement: Agreement) -> str:
    """The token of a save on whose shards all ranks have agreed."""
    return token_of(random, meta, agreement.tensors_text, agreement.digests)


def write_own_file(prepared: Prepared, do: Do = call) -> JsonObject:
    """Write this rank's file; returns its record in `checkpoint.json`. `do` works on its bytes."""
    name = f"rank-{prepared.rank:05d}-of-{prepared.world_size:05d}.safetensors"
    return _write_file(prepared.temporary / name, prepared.held, prepared.token, do)


def complete(prepared: Prepared, written: Sequence[JsonObject]) -> None:
    """Write the index of all files, and give the folder its name. For the first rank."""
    index = {
        KEY: prepared.token,
        "meta": prepared.meta,
        "files": list(written),
        "tensors": prepared.tensors,
    }
    write_index(prepared.temporary, index)
    _publish(prepared.temporary, prepared.final)


@dataclass(frozen=True)
class WriteFailure:
    """The reason for which one rank's part of a save failed."""

    reason: str
    by_disk: bool = False
    """Whether the system refused to write, and not what was to be saved."""


@dataclass(frozen=True)
class _Hold:
    """The report of one rank before anything is written."""

    token: str
    entries: list[JsonObject]
    failure: WriteFailure | None


def attempt(action: Callable[..., T], *args: object) -> T | WriteFailure:
    """The action's result, or its failure as something that can be sent to the other ranks."""
    try:
        return action(*args)
    except Exception as error:  # whatever it was, the other ranks are waiting to hear of it
        return WriteFailure(reason_of(error), isinstance(error, OSError))


def reason_of(error: Exception) -> str:
    """The words of an error, with the cure where a disk is full."""
    words = str(error) or type(error).__name__
    is_full = isinstance(error, OSError) and error.errno in FULL
    return f"{words}; make room there, or set [recovery] keep" if is_full else words


def _stop_if_failed(directory: Path, results: Sequence[object]) -> None:
    for rank, result in enumerate(results):
        if isinstance(result, WriteFailure):
            kind = SaveFailed if result.by_disk else CheckpointError
            raise kind(f"{directory} was not saved: rank {rank}: {result.reason}")


def check_meta(meta: JsonValue, path: str = "meta") -> None:
    """Refuse what JSON would lose or change, by its path. Lists and tuples are one to JSON.

    Raises:
        CheckpointError: a key that is no string, or a value that JSON has not.
    """
    if isinstance(meta, dict):
        for key, value in meta.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}, and keys of JSON are strings")
            check_meta(value, f"{path}.{key}")
    elif isinstance(meta, (list, tuple)):
        for index, value in enumerate(meta):
            check_meta(value, f"{path}[{index}]")
    elif not (meta is None or isinstance(meta, (str, int, float))):
        raise CheckpointError(
            f"{path} is a {type(meta).__name__}, which is not JSON; save tensors as shards"
        )


def _make_folder(temporary: Path, final: Path) -> None:
    """Make the folder of this save, and remove what killed saves of the same name have left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f"{final.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()


def _write_file(path: Path, shards: Sequence[Shard], token: str, do: Do) -> JsonObject:
    """Write one rank's file; returns its record in `checkpoint.json`."""
    declared: list[Declared] = [
        (f"{i:06d}/{p.name}", p.values.dtype, tuple(p.values.shape)) for i, p in enumerate(shards)
    ]
    for shard in shards:
        format_name(shard.name, shard.values.dtype)
    text = listed([entry_of(shard) for shard in shards])
    metadata = {KEY: token, "format": "pt", "pieces": text}  # the token first: see `token_in`
    with FileWriter(path, declared, metadata) as file:
        file.write_all([shards[index].values for index in file_order(declared)], do)
    return {
        "name": path.name,
        "size_bytes": file.size_bytes,
        "checksum": file.checksum,
        "pieces": digest(text),
    }


def _publish(temporary: Path, final: Path) -> None:
    """Give the finished folder its name, and let `latest` name it."""
    sync_directory(temporary)
    is_exchanged = final.exists() and exchange(temporary, final)
    if not is_exchanged:
        _rename(temporary, final)
    sync_directory(final.parent)
    if step_number(final) is not None:
        write_text_atomic(final.parent / LATEST, f"{final.name}\n")
    olds = final.parent.glob(f"{final.name}.old-*")
    for old in [*olds, temporary] if is_exchanged else olds:
        shutil.rmtree(old, ignore_errors=True)


def _rename(temporary: Path, final: Path) -> None:
    """Rename a folder; one of that name goes aside, where `resolve` finds it in between."""
    if final.exists():
        final.rename(final.with_name(f"{final.name}.old-{temporary.name.rpartition('-')[2]}"))
    temporary.rename(final)
