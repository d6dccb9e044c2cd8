"""An engine's parameters as safetensors files that others read: a Hugging Face model comes back
with `from_pretrained`.

Every rank writes its slices beside the target, then rank 0 puts them together tensor by tensor. No
rank ever holds the model, and only names are sent. As for any checkpoint, all ranks must see the
folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import Checkpoint, export_safetensors
from plait.checkpoint import save as save_shards
from plait.checkpoint.entry import dtype_name
from plait.checkpoint.export import Joined
from plait.checkpoint.hugging_face import library_names, write_adapter, write_tables
from plait.engine.state import saving
from plait.engine.state.averaging import average_buffers
from plait.engine.state.training import TrainingState
from plait.errors import CheckpointError
from plait.models import expert_adapters
from plait.models.adapter_files import form_of, peft_names
from plait.models.adapter_parts import PARTS
from plait.models.adapters import adapted, merged
from plait.models.hf import HuggingFace, files_of
from plait.models.wrapped_by_peft import form_of_wrapped, is_wrapped_by_peft
from plait.values import JsonMapping

MAX_SHARD_BYTES = 5_000_000_000


def save_pretrained(
    state: TrainingState,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
    tables: JsonMapping | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with their index, and the `config.json` of a Hugging
    Face model. Collective.

    A model with adapters is written as PEFT's two files, also one that PEFT has wrapped. With
    `merge` it is the whole model, each adapter added to its weight. `tables` (file name -> content)
    say which model of the library plait's own GPT or Llama is, whose names are written then.

    Values are those of the masters, converted to `dtype` if given. A tied parameter is written
    once, under the name that it has first, as transformers does.

    Raises:
        CheckpointError: on every rank alike, where a rank could not write. Or `merge` of a model
            that PEFT has wrapped.
    """
    form = form_of_wrapped(state.model, state.holding.shapes)
    if merge and is_wrapped_by_peft(state.model):
        raise CheckpointError(
            "merge adds the adapters of [adapter] to weights, and this model was wrapped by PEFT; "
            "leave merge out, and merge what is saved by PEFT: "
            "PeftModel.from_pretrained(base, path).merge_and_unload()"
        )
    state.driver.synchronize()
    state.show_evaluated_weights()
    average_buffers(state)
    gather = state.world.axis("world").gather_objects
    rank = state.world.rank
    slices = path / ".slices"
    alone = bool(adapted(state.model)) and not merge
    shards = [*saving.saved_parameters(state, frozen=not alone)]
    if form is not None:
        shards = [shard for shard in shards if shard.name in form.names]
    elif not alone:
        shards += saving.saved_buffers(state)
    failure: str | None = None
    written: list[Path] = []
    save_shards(slices, shards, {}, rank=rank, world_size=state.world.size, gather=gather)
    if rank == 0:
        try:
            if form is not None or alone:
                form = form or form_of(state.model)
                written = write_adapter(slices, path, form.config, form.names, dtype)
            else:
                layout = FileLayout(path, dtype, max_shard_bytes, tables)
                written = _assemble(state, slices, layout)
        except (CheckpointError, OSError) as error:
            failure = str(error)
        shutil.rmtree(slices, ignore_errors=True)
    told: list[tuple[str | None, list[Path]]] = gather((failure, written))
    if told[0][0] is not None:
        raise CheckpointError(f"{path} was not saved: {told[0][0]}")
    return told[0][1]


@dataclass(frozen=True)
class FileLayout:
    """The folder of a whole model, the type and size of its files, and those without weights."""

    path: Path
    dtype: torch.dtype | None
    max_shard_bytes: int
    tables: JsonMapping | None


def _assemble(state: TrainingState, slices: Path, layout: FileLayout) -> list[Path]:
    adapters = adapted(state.model)
    _check_untied(state, adapters)
    parts = peft_names(state.model)
    names = {name: name for name in state.holding.shapes if name not in parts}
    joined: dict[str, Joined] = {}
    tables = layout.tables
    if isinstance(state.model, HuggingFace):
        names = {name: written.removeprefix("model.") for name, written in names.items()}
        tables = files_of(state.model)
    elif tables is not None:
        names, joined = library_names([*names], tables)
    config: list[Path] = []
    if tables is not None:
        saved = layout.dtype or Checkpoint.open(slices).dtype(next(iter(names)))
        config = write_tables(layout.path, tables, dtype_name(saved))

    def change(slices: Checkpoint, name: str, weight: Tensor) -> Tensor:
        layer, _, key = name.rpartition(".")
        adapter = adapters[layer].adapter if layer in adapters else None
        if adapter is not None and key in adapter.keys:
            a, b = (slices.tensor(f"{layer}.{part}.{key}.weight") for part in PARTS[:2])
            return expert_adapters.merged(weight, a, b, adapter)
        if adapter is None or adapter.keys or key != "weight":
            return weight
        a, b = (slices.tensor(f"{layer}.{part}.weight") for part in PARTS[:2])
        trained = f"{layer}.{PARTS[2]}.weight"
        magnitude = slices.tensor(trained) if trained in parts else None
        return merged(weight, a, b, adapter, magnitude)

    files = export_safetensors(
        slices,
        layout.path,
        names=names,
        dtype=layout.dtype,
        max_shard_bytes=layout.max_shard_bytes,
        change=change if adapters else None,
        joined=joined,
    )
    return [*files, *config]


def _check_untied(state: TrainingState, adapters: Mapping[str, Any]) -> None:
    """Errors: `CheckpointError` for an adapter on a weight that has its first name elsewhere."""
    for layer, module in adapters.items():
        if not module.adapter.keys and f"{layer}.weight" not in state.holding.shapes:
            raise CheckpointError(
                f"the weight of '{layer}' is tied to another, which has no adapter, so the sum has "
                "no place in the model; leave merge out for PEFT's files, or train without "
                f"adapters on '{layer}'"
            )
