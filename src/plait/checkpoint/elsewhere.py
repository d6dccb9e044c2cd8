"""Weights that other frameworks have saved: torch's distributed checkpoints (DCP: FSDP2,
torchtitan), DeepSpeed's ZeRO-3 shards, and files of `torch.save`.

Nothing is unpickled but tensors and plain values. What the frameworks' own metadata needs besides
is named here, type by type; any other type is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.values import JsonObject, PyTree

METADATA: Final = ".metadata"
FLAT: Final = "fp32_flat_groups"
MODEL_STATES: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt$")
OPTIMIZER_STATES: Final = "*_optim_states.pt"
NESTED: Final = ("model", "module", "state_dict", "model_state_dict")
"""Keys under which files of `torch.save` have the weights of a module."""

WRAPPED: Final = "module."
"""The prefix that DistributedDataParallel gives to every name."""
TRAINING: Final = ("optim", "lr_", "scheduler", "train", "dataloader", "step", "epoch", "rng")
"""How the names of what is saved beside weights begin."""

DCP_TYPES: Final = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|TensorStorageMetadata"
    r"|BytesStorageMetadata|ChunkStorageMetadata|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.(Size|device|serialization\._get_layout|float\w*|bfloat16|u?int\d+|bool)"
    r"|collections\.OrderedDict|pathlib\.(PosixPath|WindowsPath|Path|PurePosixPath)"
    r"|pathlib\._local\.PosixPath"
)
"""Types in the metadata of a distributed checkpoint. A whole module is never allowed, since some of
torch's own functions import or unpickle their arguments.
"""

DEEPSPEED_TYPES: Final = re.compile(
    r"torch\.(Size|device|Tensor|FloatStorage|HalfStorage|BFloat16Storage|LongStorage|IntStorage"
    r"|DoubleStorage|BoolStorage|ByteStorage|float\w*|bfloat16|u?int\d+|bool)"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.nn\.parameter\.Parameter"
    r"|torch\.storage\.(Untyped|Typed)Storage|collections\.OrderedDict"
)
"""Types in DeepSpeed's files. Its own classes become empty stand-ins."""


def read_elsewhere(path: str | Path) -> tuple[str, dict[str, Tensor]]:
    """The kind of a checkpoint, `dcp`, `deepspeed` or `torch`, and its whole weights [...] by name.

    All weights are in memory at once. Errors: `CheckpointError` for anything else, a type that is
    not allowed, and files that are missing or damaged.
    """
    path = Path(path)
    try:
        if (path / METADATA).is_file():
            return "dcp", _weights(path, _read_dcp(path))
        if path.is_dir():
            return "deepspeed", _read_zero3(_zero_folder(path))
        return "torch", _weights(path, torch.load(path, map_location="cpu", weights_only=True))
    except CheckpointError:
        raise
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is not None:
            raise _refused(asked[1]) from None
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} cannot be read as weights: it is damaged, or no file of torch.save; "
                "copy it again, or name another file"
            ) from error
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {first}") from error


def check_folder(path: Path) -> None:
    """Refuse a folder that holds no checkpoint. Errors: `CheckpointError`."""
    if path.is_dir() and not (path / METADATA).is_file():
        _zero_folder(path)


def write_dcp(weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write whole weights [...] as a distributed checkpoint that FSDP2 and torchtitan load, from
    one process.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no process group
        save(dict(weights), checkpoint_id=str(folder), no_dist=True)


def write_torch(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a state of whole weights [...] by `torch.save`, which `torch.load` reads with
    `weights_only`.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save(dict(weights), temporary)
    temporary.replace(path)


def _weights(path: Path, found: object) -> dict[str, Tensor]:
    """The tensors of a module's state, which may lie under a key of its own."""
    if isinstance(found, Mapping):
        for key in NESTED:
            if isinstance(found.get(key), Mapping):
                return _weights(path, found[key])
        prefix = next((f"{key}." for key in NESTED if _is_below(found, f"{key}.")), "")
        tensors = {
            str(name).removeprefix(prefix): value
            for name, value in found.items()
            if isinstance(value, Tensor) and str(name).startswith(prefix)
        }
        if tensors:
            return tensors
    raise CheckpointError(f"{path} holds no weights of a module: a mapping from names to tensors")


def _is_below(found: Mapping[object, object], prefix: str) -> bool:
    """Whether a flat state has its weights below a key: beside them is only state of training.

    A library's names may begin in the same way: `model.embed.weight` beside `lm_head.weight`.
    """
    names = [str(name) for name, value in found.items() if isinstance(value, Tensor)]
    beside = [name for name in names if not name.startswith(prefix)]
    if prefix == WRAPPED:
        return bool(names) and not beside
    return 0 < len(beside) < len(names) and all(name.startswith(TRAINING) for name in beside)


def _read_dcp(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a distributed checkpoint, by torch's own reader."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata: Any = _MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no process group
        load(tensors, checkpoint_id=str(folder), no_dist=True)
    paths = metadata.planner_data or {}
    nested = {
        ".".join(map(str, path[1:])): tensors[name]
        for name, path in paths.items()
        if name in tensors and len(path) > 1 and path[0] in NESTED
    }
    return nested or tensors


def _zero_folder(path: Path) -> Path:
    """The folder of one step, which the file `latest` names."""
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    if not any(folder.glob(OPTIMIZER_STATES)):
        raise CheckpointError(
            f"{path} has neither {METADATA} (a distributed checkpoint) nor *_optim_states.pt "
            "(DeepSpeed); name the folder that has them, or a file of torch.save"
        )
    return folder


def _read_zero3(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of ZeRO-3: each parameter lies in equal parts on all ranks, the last one
    filled up.
    """
    of_rank = {}
    for file in folder.glob("*_model_states.pt"):
        named = MODEL_STATES.search(file.name)
        if named is None:
            raise CheckpointError(
                f"{file} is not of ZeRO-3 without tensor parallelism; convert it with the "
                "zero_to_fp32.py beside it, and import the file that this writes"
            )
        of_rank[int(named[1])] = file
    states = [_optimizer_state(folder, rank) for rank in range(len(of_rank))]
    flats = [torch.cat([group.reshape(-1) for group in state[FLAT]]) for state in states]
    model = _load_allowed(of_rank[0])
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    weights: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        part = -(-numel // len(flats))
        if start + part > flats[0].numel():
            raise CheckpointError(
                f"{folder}: '{name}' {list(shape)} lies beyond the {flats[0].numel()} elements of "
                "a rank; a file belongs to another run"
            )
        whole = torch.cat([flat[start : start + part] for flat in flats])
        weights[name] = whole[:numel].reshape(shape).clone()
        start += part
    weights |= {name: model["module"][name].float() for name in model.get("buffer_names", ())}
    for shared, source in dict(model.get("shared_params", {})).items():
        weights[shared] = weights[source]
    return weights


def _optimizer_state(folder: Path, rank: int) -> JsonObject:
    found = sorted(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    if not found:
        raise CheckpointError(f"{folder} lacks the optimizer's states of rank {rank}")
    state: JsonObject = _load_allowed(found[0])["optimizer_state_dict"]
    if FLAT not in state:
        raise CheckpointError(f"{found[0]} has no '{FLAT}': it is not of ZeRO stage 3")
    return state


def _load_allowed(file: Path) -> PyTree:
    """A file of `torch.save` with DeepSpeed's types."""
    module = ModuleType("plait_allowed")
    module.Unpickler = _DeepSpeedUnpickler  # type: ignore[attr-defined]
    module.load = _load_listed  # type: ignore[attr-defined]
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=module)


class _StandIn:
    """A value of one of DeepSpeed's own classes, which is not read."""

    def __init__(self, *args: object) -> None:
        """Forget what it was made of."""

    def __setstate__(self, state: object) -> None:
        """Forget what it held."""


class _ListedUnpickler(pickle.Unpickler):
    """An unpickler that knows the types of a list, and refuses all others."""

    allowed: re.Pattern[str]

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """A type of the list. Raises `CheckpointError` for any other."""
        full = f"{module}.{name}"
        if self.allowed.fullmatch(full) is None:
            raise _refused(full)
        found: Callable[..., object] = super().find_class(module, name)
        return found


class _MetadataUnpickler(_ListedUnpickler):
    """The types in the metadata of a distributed checkpoint."""

    allowed = DCP_TYPES


class _DeepSpeedUnpickler(_ListedUnpickler):
    """The types in DeepSpeed's files; its own classes become stand-ins."""

    allowed = DEEPSPEED_TYPES

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """A type of the list, or a stand-in. Raises `CheckpointError` for any other."""
        if module.split(".", maxsplit=1)[0] == "deepspeed":
            return _StandIn
        return super().find_class(module, name)


def _load_listed(stream: IO[bytes], **named: Any) -> PyTree:
    return _DeepSpeedUnpickler(stream, **named).load()


def _refused(name: str) -> CheckpointError:
    return CheckpointError(
        f"the file asks for '{name}', which a checkpoint's values do not need; it is not unpickled"
    )
