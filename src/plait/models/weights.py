"""The start values of a model that others have saved: safetensors files, read by slices.

Only headers are read at opening, so a misfit is an error before anything runs. Then every rank
reads the elements that it keeps, and no rank holds the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError, some_of

MakeStart = Callable[[], nn.Module]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name there, and its shape."""

    file: Path
    key: str
    shape: tuple[int, ...]


class JoinedTensor(Stored):
    """A tensor that is made of several in files."""

    def read(self, index: Sequence[slice] | None, read: Callable[[Stored], Tensor]) -> Tensor:
        """The elements at `index`, a range for every dim; all of a tensor of the shape of this one
        without it. `read` reads a whole tensor of a file.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RowNorms(Stored):
    """The norms of the rows of a matrix in a file; of its columns where it is `transposed`."""

    transposed: bool = False


@dataclass(frozen=True)
class Weights:
    """Where the value of each parameter lies, by the parameter's name in the model."""

    directory: Path
    stored: Mapping[str, Stored]

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open for reading; files are mapped when they are first needed."""
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()


@dataclass
class Reader:
    """Reads parts of tensors; `num_bytes` counts what was read."""

    weights: Weights
    num_bytes: int = 0
    _files: dict[Path, Any] = field(default_factory=dict)

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor:
        """The elements of a parameter at `index`, a range for every dim; all without it, in the
        shape of the parameter. In the file's type.
        """
        stored = self.weights.stored[name]
        if isinstance(stored, JoinedTensor):
            return stored.read(index, self._whole)
        file = self._file(stored)
        if isinstance(stored, RowNorms):
            return self._norms(file.get_slice(stored.key), stored, index)
        if index is None or not stored.shape:
            value: Tensor = file.get_tensor(stored.key)
        else:
            value = file.get_slice(stored.key)[tuple(index)]
        self.num_bytes += value.numel() * value.element_size()
        return value

    def _file(self, stored: Stored) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = _open(stored.file)
        return self._files[stored.file]

    def _whole(self, stored: Stored) -> Tensor:
        value: Tensor = self._file(stored).get_tensor(stored.key)
        self.num_bytes += value.numel() * value.element_size()
        return value

    def _norms(self, matrix: Any, stored: RowNorms, index: Sequence[slice] | None) -> Tensor:
        rows = slice(None) if index is None else index[0]
        part: Tensor = matrix[:, rows] if stored.transposed else matrix[rows]
        self.num_bytes += part.numel() * part.element_size()
        return part.double().norm(dim=0 if stored.transposed else 1)

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()


def open_folder(directory: Path, names: Sequence[str] | None = None) -> dict[str, Stored]:
    """Every tensor in the safetensors files of a directory, by its name there. `names`, else an
    index, if there is one, name the files.

    Raises:
        ModelError: no files; a missing or unreadable file; a name in two files; values other than
            floats.
    """
    tensors: dict[str, Stored] = {}
    paths = _files(directory) if names is None else [directory / name for name in names]
    for path in paths:
        file = _open(path)
        for key in file.keys():  # not a mapping  # noqa: SIM118
            part = file.get_slice(key)
            if key in tensors:
                raise ModelError(
                    f"the weights {str(directory)!r} hold {key} twice: in {tensors[key].file.name} "
                    f"and {path.name}"
                )
            tensors[key] = Stored(path, key, tuple(part.get_shape()))
    return tensors


def fit(
    directory: Path,
    found: Mapping[str, Stored],
    wanted: Mapping[str, Sequence[int]],
    ignored: Sequence[str] = (),
) -> Weights:
    """The values of the parameters `wanted` (name and shape) among the tensors `found`.

    `ignored` are names that may be there and are not used.

    Raises:
        ModelError: with all that is missing, unexpected or of another shape.
    """
    missing = [name for name in wanted if name not in found]
    extra = sorted(found.keys() - wanted.keys() - set(ignored))
    misfits = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    faults = [
        some_of(misfits),
        some_of([f"no {name}" for name in missing]),
        some_of([f"{name} is not in the model" for name in extra]),
    ]
    if any(faults):
        number = len(missing) + len(extra) + len(misfits)
        raise ModelError(
            f"the weights {str(directory)!r} do not fit the config: "
            f"{'; '.join(filter(None, faults))} ({number} in all)"
        )
    return Weights(directory, {name: found[name] for name in wanted})


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as failure:
            raise ModelError(f"the index {str(index)!r} cannot be read: {failure}") from failure
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ModelError(
                f"the weights {str(directory)!r} lack {', '.join(missing)}, which their index names"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"the weights {str(directory)!r} hold no *.safetensors files")
    return files


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as failure:
        raise ModelError(f"the weights {str(path)!r} cannot be read: {failure}") from failure


def weights_of(model: nn.Module) -> Weights | None:
    """Where a model on the meta device says that its values are."""
    found = getattr(model, "weights", None)
    return found if isinstance(found, Weights) else None


def start_of(model: nn.Module) -> MakeStart | None:
    """The maker of a model with start values, of a model on the meta device that names one."""
    found: MakeStart | None = getattr(model, "make_start", None)
    return found


def wholly_on_meta(model: nn.Module) -> nn.Module:
    """The model, with all of its parameters and buffers on the meta device.

    Some families make them by calls that take no default device. Their values come with the others,
    when the model makes its start or its weights are read.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not param.is_meta:
                on_meta = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                module._parameters[name] = moved.setdefault(id(param), on_meta)
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to("meta")
    return model
