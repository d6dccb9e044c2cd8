"""Export: a checkpoint's tensors, whole, in plain safetensors files as Hugging Face libraries read
them.

One tensor at a time goes through memory. So the host needs room for the largest tensor, not for the
model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.entry import RANDOM_PREFIX
from plait.checkpoint.file import Declared, FileWriter, file_order
from plait.checkpoint.folder import sync_directory, write_text_atomic
from plait.checkpoint.read import Checkpoint
from plait.errors import WRITE_ELSEWHERE, CheckpointError

MAX_SHARD_BYTES = 5_000_000_000
Change = Callable[[Checkpoint, str, Tensor], Tensor]
"""From a checkpoint, the name of a tensor in it and its value to the value that is exported."""
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Joined:
    """A tensor made of several of a checkpoint, one behind the other along the first dim.

    Attributes:
        sources: their names in the checkpoint, in their order.
        transposed: whether the result is written with its two dims exchanged.
    """

    sources: tuple[str, ...]
    transposed: bool = False

    def shape(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """The shape that is written."""
        shapes = [checkpoint.global_shape(name) for name in self.sources]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if self.transposed else whole

    def value(self, checkpoint: Checkpoint, change: Change | None = None) -> Tensor:
        """The values that are written, in the shape that `shape` says: [rows, ...], or [columns,
        rows] where transposed. `change` is applied to each source.
        """
        parts = [_changed(checkpoint, name, change) for name in self.sources]
        whole = torch.cat(parts)
        return whole.t().contiguous() if self.transposed else whole


@dataclass(frozen=True)
class _Entry:
    """One tensor to write: its name in the checkpoint, and its declaration in the file."""

    source: str
    declared: Declared
    joined: Joined | None = None

    @property
    def num_bytes(self) -> int:
        return self.declared[1].itemsize * torch.Size(self.declared[2]).numel()


def export_safetensors(
    checkpoint_dir: str | Path,
    out: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    change: Change | None = None,
    joined: Mapping[str, Joined] | None = None,
) -> list[Path]:
    """Write full tensors; returns the files written, the index last.

    `out` that ends in `.safetensors` becomes one file of any size. Anything else becomes a folder
    with `model.safetensors`, or with shards of at most `max_shard_bytes` and their index. A larger
    tensor is alone in its shard. `names` maps names of the checkpoint to names of the export, and
    selects. Without it all but random states are written under their names. `dtype` converts
    floating tensors, after `change` has changed them. `joined` are more tensors, by their names in
    the export.

    Raises:
        CheckpointError: as `Checkpoint.open` and `fill`; a name that is not there; two tensors
            under one name; `out` cannot be written.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    checkpoint = Checkpoint.open(checkpoint_dir)
    out = Path(out)
    entries = [
        _entry(checkpoint, source, name, dtype)
        for source, name in _selected(checkpoint, names).items()
    ]
    entries += [_joined_entry(checkpoint, name, one, dtype) for name, one in (joined or {}).items()]
    try:
        if out.suffix == ".safetensors":
            out.parent.mkdir(parents=True, exist_ok=True)
            return [_write(checkpoint, out, entries, change)]
        out.mkdir(parents=True, exist_ok=True)
        return _write_shards(checkpoint, out, _shards(entries, max_shard_bytes), change)
    except OSError as error:
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise CheckpointError(
                f"{out} cannot be written: a file has the name of this folder, or of one above "
                "it; name another folder"
            ) from error
        raise CheckpointError(
            f"{out} cannot be written: {error.strerror or error}; {WRITE_ELSEWHERE}"
        ) from error


def _selected(checkpoint: Checkpoint, names: Mapping[str, str] | None) -> dict[str, str]:
    if names is None:
        return {name: name for name in checkpoint.names() if not name.startswith(RANDOM_PREFIX)}
    sources: dict[str, str] = {}
    for source, name in names.items():
        if name in sources:
            raise CheckpointError(
                f"'{sources[name]}' and '{source}' would both be exported as '{name}'"
            )
        sources[name] = source
    return dict(names)


def _entry(checkpoint: Checkpoint, source: str, name: str, dtype: torch.dtype | None) -> _Entry:
    saved = checkpoint.dtype(source)
    target = dtype if dtype is not None and saved.is_floating_point else saved
    return _Entry(source, (name, target, checkpoint.global_shape(source)))


def _joined_entry(
    checkpoint: Checkpoint, name: str, joined: Joined, dtype: torch.dtype | None
) -> _Entry:
    first = joined.sources[0]
    _, saved, _ = _entry(checkpoint, first, name, dtype).declared
    return _Entry(first, (name, saved, joined.shape(checkpoint)), joined)


def _shards(entries: Sequence[_Entry], max_bytes: int) -> list[list[_Entry]]:
    """Consecutive tensors, as many to a shard as fit; at least one shard."""
    shards: list[list[_Entry]] = [[]]
    room = max_bytes
    for entry in entries:
        if entry.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.num_bytes
    return shards


def _write(
    checkpoint: Checkpoint, path: Path, entries: Sequence[_Entry], change: Change | None
) -> Path:
    """One file, visible when it is complete."""
    declared = [entry.declared for entry in entries]
    temporary = path.with_name(f"{path.name}.tmp")
    with FileWriter(temporary, declared, {"format": "pt"}, checksums=False) as file:
        for index in file_order(declared):
            file.write(_value(checkpoint, entries[index], change))
    temporary.replace(path)
    sync_directory(path.parent)
    return path


def _value(checkpoint: Checkpoint, entry: _Entry, change: Change | None) -> Tensor:
    dtype = entry.declared[1]
    if entry.joined is not None:
        return entry.joined.value(checkpoint, change).to(dtype)
    if change is None:
        return checkpoint.tensor(entry.source, dtype)
    return _changed(checkpoint, entry.source, change).to(dtype)


def _changed(checkpoint: Checkpoint, name: str, change: Change | None) -> Tensor:
    value = checkpoint.tensor(name)
    return value if change is None else change(checkpoint, name, value)


def _write_shards(
    checkpoint: Checkpoint,
    folder: Path,
    shards: Sequence[Sequence[_Entry]],
    change: Change | None,
) -> list[Path]:
    if len(shards) == 1:
        return [_write(checkpoint, folder / "model.safetensors", shards[0], change)]
    written = []
    weight_map = {}
    for number, entries in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written.append(_write(checkpoint, folder / name, entries, change))
        weight_map.update({entry.declared[0]: name for entry in entries})
    total_bytes = sum(entry.num_bytes for entries in shards for entry in entries)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_text_atomic(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")
    return [*written, folder / INDEX_NAME]
