"""Load: what is wanted, intersected with what was written. Nothing here knows the plan of either
side.

A target shard is cut into rectangles; every saved rectangle of that name takes its part of them,
once. What is left over at the end is in no file, and is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.entry import RANDOM_PREFIX, view
from plait.checkpoint.file import FileReader
from plait.checkpoint.folder import INDEX, cure, read_index, resolve
from plait.checkpoint.rules import is_count, is_shape
from plait.checkpoint.token import KEY, digest, lacks_token, token_in
from plait.errors import CheckpointError, nearest, some_of
from plait.mesh import Shard
from plait.mesh.boxes import Box, FlatRange, Rectangle
from plait.values import JsonObject

ADAPTER_PART = ".lora_A."
"""A part of names that every adapter has, and no other module."""
_LISTED = 8  # names in an error message
_SHAPES_LISTED = 3  # shapes in an error message


class ShardFile(Protocol):
    """The shards of one rank, on a disk (`FileReader`) or in memory."""

    path: Path
    metadata: dict[str, str]

    def form(self, name: str) -> tuple[torch.dtype, int]:
        """The type and the number of elements of a shard."""

    def tensor(self, name: str) -> Tensor:
        """The values (numel,) of a shard."""

    def check(self, name: str, start: int, stop: int) -> None:
        """Raise `CheckpointError` where elements [start, stop) are not what was written."""

    def check_all(self) -> None:
        """Raise `CheckpointError` where anything is not what was written."""


@dataclass(frozen=True)
class _Saved:
    """One saved shard: where its elements lie in the global tensor, and in which file."""

    key: str
    rectangles: list[Rectangle]
    file: ShardFile


class Checkpoint:
    """An open checkpoint. Files are mapped when they are first needed; each block's checksum is
    checked when it is read.
    """

    def __init__(self, directory: Path, index: JsonObject) -> None:
        self.directory = directory
        self.meta: JsonObject = index["meta"]
        self.token: str | None = index.get(KEY)
        self._files: list[JsonObject] = index["files"]
        self._tensors: JsonObject = index["tensors"]
        self._readers: dict[int, ShardFile] = {}
        self._shards: dict[int, dict[str, list[_Saved]]] = {}

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Open the checkpoint that `resolve(path)` finds, and see that all its files are there with
        their sizes.

        Raises:
            CheckpointError: none found; wrong format version; damaged `checkpoint.json`; files of
                two saves; or a missing or truncated file. The last names the file, both sizes, and
                the checkpoint to load instead.
        """
        directory = resolve(path)
        checkpoint = Checkpoint(directory, read_index(directory))
        for index, file in enumerate(checkpoint._files):
            checkpoint._check_save(index, directory / file["name"])
        return checkpoint

    @property
    def note(self) -> str | None:
        """A line for the user about what cannot be checked here; None where everything can."""
        if self.token is not None:
            return None
        return (
            f"{self.directory} is from before saves had a token: "
            "whether all its files are of one save is not checked"
        )

    def _check_save(self, index: int, path: Path) -> None:
        """See that a file is there, whole, and of the same save as the index."""
        token = token_in(path)
        if token != self.token and (token is not None or lacks_token(path)):
            raise CheckpointError(
                f"{path} is of another save ({token or 'without a token'}) than {INDEX} "
                f"({self.token or 'without a token'}): files of two saves are mixed"
                f"{cure(self.directory)}"
            )
        self._check_size(path, self._files[index]["size_bytes"])
        if token != self.token:
            with self._adding_cure():
                self._reader(index)  # its head is damaged, which is found here

    def _check_size(self, path: Path, expected: int) -> None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing ({expected:,} bytes){cure(self.directory)}"
            ) from error
        if size != expected:
            raise CheckpointError(
                f"{path} is damaged: it has {size:,} of {expected:,} bytes{cure(self.directory)}"
            )

    def names(self) -> list[str]:
        """The names of all saved tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a saved tensor."""
        return tuple(self._tensor(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor was saved."""
        found: torch.dtype = getattr(torch, self._tensor(name)["dtype"])
        return found

    def _tensor(self, name: str) -> JsonObject:
        if name not in self._tensors:
            raise CheckpointError(
                f"'{name}' is not in {self.directory}; {nearest(name, self._tensors)}"
            )
        found: JsonObject = self._tensors[name]
        return found

    def check(self, wanted: Mapping[str, Sequence[int]], complete: bool = True) -> None:
        """Compare names and shapes before anything is loaded; random states are left out.

        `wanted` maps names to global shapes. When it is `complete` (those of all ranks), saved
        unwanted names are errors too.

        Raises:
            CheckpointError: with all that is missing, unexpected or of another shape.
        """
        saved = {name for name in self._tensors if not name.startswith(RANDOM_PREFIX)}
        names = {name for name in wanted if not name.startswith(RANDOM_PREFIX)}
        faults = []
        self._check_adapters(names, saved)
        if missing := sorted(names - saved):
            faults.append(f"not in the checkpoint: {some_of(map(repr, missing), _LISTED)}")
        if complete and (unexpected := sorted(saved - names)):
            faults.append(f"in the checkpoint only: {some_of(map(repr, unexpected), _LISTED)}")
        common = sorted(names & saved)
        others = [name for name in common if self.global_shape(name) != tuple(wanted[name])]
        for name in others[:_SHAPES_LISTED]:
            faults.append(
                f"'{name}' has shape {self.global_shape(name)} there and {tuple(wanted[name])} here"
            )
        if len(others) > _SHAPES_LISTED:
            faults.append(f"{len(others) - _SHAPES_LISTED} more have other shapes")
        if faults:
            raise CheckpointError(
                f"{self.directory} is of another model; {'; '.join(faults)}. A checkpoint is "
                "loaded by the model that wrote it, with the same settings, such as those of --set"
            )

    def _check_adapters(self, asked: set[str], saved: set[str]) -> None:
        """Say it where only one of the model and the checkpoint has adapters."""
        has, wants = (any(ADAPTER_PART in name for name in names) for names in (saved, asked))
        if has and not wants:
            raise CheckpointError(
                f"{self.directory} holds adapters alone, and this model has none; give the "
                "[adapter] section that they were trained with (config.toml of their run has it)"
            )
        if wants and not has:
            raise CheckpointError(
                f"{self.directory} holds a whole model, and this one has adapters beside it; leave "
                "[adapter] out to go on with the model"
            )

    def fill(self, shard: Shard, convert: bool = False) -> None:
        """Copy the shard's elements from the checkpoint into its tensor, which may be on any
        device.

        With `convert`, values of one floating type become another's (master weights into bf16 and
        back).

        Raises:
            CheckpointError: unknown name; another shape or type; elements in no file; a damaged
                block. The shard's tensor is then undefined.
        """
        self._check_form(shard, convert)
        targets = shard.flat_range.rectangles()
        remaining = [(target, target.box) for target in targets]
        for saved in self._saved(shard.name):
            if not remaining:
                break
            for rectangle in saved.rectangles:
                left: list[tuple[Rectangle, Box]] = []
                for target, box in remaining:
                    shared = box.intersect(rectangle.box)
                    if shared is None:
                        left.append((target, box))
                        continue
                    self._copy(shard, target, (saved, rectangle), shared)
                    left += [(target, part) for part in box.subtract(shared)]
                remaining = left
        if remaining:
            self._raise_uncovered(shard, [box for _, box in remaining])

    def load(self, shards: Iterable[Shard], convert: bool = False) -> None:
        """Fill every shard, after `check` of their names and shapes (not `complete`: other ranks
        want other names).
        """
        held = list(shards)
        self.check({shard.name: shard.global_shape for shard in held}, complete=False)
        for shard in held:
            self.fill(shard, convert)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One whole tensor in its shape, in memory of its own, in its saved type or converted.
        Errors: as `fill`.
        """
        full = torch.empty(self.global_shape(name), dtype=dtype or self.dtype(name))
        self.fill(Shard.whole(name, full), convert=dtype is not None)
        return full

    def verify(self) -> None:
        """Read everything and compare all checksums. Errors: `CheckpointError` naming the file and
        its bytes.
        """
        for index in range(len(self._files)):
            with self._adding_cure():
                self._reader(index).check_all()

    def _check_form(self, shard: Shard, convert: bool) -> None:
        shape = self.global_shape(shard.name)
        dtype = self.dtype(shard.name)
        if shape != tuple(shard.global_shape):
            raise CheckpointError(
                f"'{shard.name}' has shape {shape} in {self.directory} and "
                f"{tuple(shard.global_shape)} here"
            )
        if dtype == shard.values.dtype:
            return
        if not (dtype.is_floating_point and shard.values.dtype.is_floating_point):
            raise CheckpointError(
                f"'{shard.name}' is {dtype} in {self.directory} and {shard.values.dtype} here"
            )
        if not convert:
            raise CheckpointError(
                f"'{shard.name}' is {dtype} in {self.directory} and {shard.values.dtype} here; "
                "load it with convert=True, or train in the precision of the checkpoint"
            )

    def _copy(
        self, shard: Shard, target: Rectangle, origin: tuple[_Saved, Rectangle], shared: Box
    ) -> None:
        saved, rectangle = origin
        start, stop = _span(shared, rectangle)
        with self._adding_cure():
            saved.file.check(saved.key, start, stop)
        values = view(saved.file.tensor(saved.key), rectangle)[shared.within(rectangle.box)]
        with torch.no_grad():
            view(shard.values, target)[shared.within(target.box)].copy_(values)

    def _raise_uncovered(self, shard: Shard, boxes: Sequence[Box]) -> None:
        first = min(boxes, key=lambda box: box.offset)
        last = tuple(end - 1 for end in first.end)
        num_elements = sum(box.numel for box in boxes)
        raise CheckpointError(
            f"'{shard.name}' {tuple(shard.global_shape)}: elements {first.offset} to {last} are in "
            "no file of "
            f"{self.directory} ({num_elements:,} of {shard.numel:,} are "
            f"missing){cure(self.directory)}"
        )

    def _saved(self, name: str) -> Iterator[_Saved]:
        """The saved shards of a name, file by file."""
        for index in self._tensors[name]["files"]:
            if index not in self._shards:
                self._shards[index] = self._read_entries(index)
            yield from self._shards[index].get(name, ())

    def _read_entries(self, index: int) -> dict[str, list[_Saved]]:
        with self._adding_cure():
            reader = self._reader(index)
            try:
                return self._saved_of(reader, self._files[index].get("pieces"))
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{reader.path} cannot be right: its list of shards has a fault ({error})"
                ) from error

    def _saved_of(self, reader: ShardFile, expected: str | None) -> dict[str, list[_Saved]]:
        """The shards of a file by name. Errors: `ValueError`, `TypeError`, `KeyError`."""
        text = reader.metadata["pieces"]
        if expected is not None and digest(text) != expected:
            raise ValueError("it is not the one that was saved")
        shards_of: dict[str, list[_Saved]] = {}
        for number, entry in enumerate(json.loads(text)):
            name = entry["name"]
            sound = is_shape(entry["offset"]) and is_shape(entry["extent"])
            if not sound or not is_count(entry["start"]) or not is_count(entry["stop"]):
                raise ValueError(f"a shard of '{name}' lies nowhere")
            key = f"{number:06d}/{name}"
            box = Box(tuple(entry["offset"]), tuple(entry["extent"]))
            flat_range = FlatRange(box, entry["start"], entry["stop"])
            known = self._tensors[name]
            if entry["shape"] != known["shape"] or entry["dtype"] != known["dtype"]:
                raise ValueError(f"'{name}' has another shape or type in {INDEX}")
            if not box.fits(known["shape"]):
                raise ValueError(f"a shard of '{name}' lies outside its shape {known['shape']}")
            if reader.form(key) != (self.dtype(name), flat_range.numel):
                raise ValueError(f"a shard of '{name}' has other elements in the file")
            saved = _Saved(key, flat_range.rectangles(), reader)
            shards_of.setdefault(name, []).append(saved)
        return shards_of

    def _reader(self, index: int) -> ShardFile:
        if index not in self._readers:
            file = self._files[index]
            self._check_size(self.directory / file["name"], file["size_bytes"])
            self._readers[index] = FileReader(self.directory / file["name"], file["checksum"])
        return self._readers[index]

    @contextmanager
    def _adding_cure(self) -> Iterator[None]:
        """Let a damaged file's error say what to load instead."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}{cure(self.directory)}") from error


def _span(part: Box, rectangle: Rectangle) -> tuple[int, int]:
    """The shortest range of a flat range's elements that holds `part`, a box inside one of its
    rectangles.
    """
    first = 0
    last = 0
    for start, end, base, size in zip(
        part.offset, part.end, rectangle.box.offset, rectangle.box.extent, strict=True
    ):
        first = first * size + start - base
        last = last * size + end - 1 - base
    return rectangle.position + first, rectangle.position + last + 1
