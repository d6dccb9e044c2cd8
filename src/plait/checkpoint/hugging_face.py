"""A checkpoint's weights under the names of Hugging Face: what `from_pretrained` of the same
architecture reads.

plait keeps query, key and value apart and turns halves against halves, as that library's Llama
does. So a dense Llama is a matter of names. A GPT is written as `gpt2` says. Other models keep the
names they have. A model that came from the library has its names and its config in the checkpoint,
under `META`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint import gpt2
from plait.checkpoint.entry import RANDOM_PREFIX, dtype_name
from plait.checkpoint.export import MAX_SHARD_BYTES, Joined, export_safetensors
from plait.checkpoint.folder import write_text_atomic
from plait.checkpoint.read import Checkpoint
from plait.values import JsonMapping, JsonObject

if TYPE_CHECKING:
    import torch

NOT_WEIGHTS = ("optimizer/", "strategy/", RANDOM_PREFIX)
META = "huggingface"
"""The key of the meta data that holds the files of a library's model, by name. They are
`config.json`, and `generation_config.json` where there is one.
"""
ADAPTER = "adapter"
"""The key of the meta data that holds the form of adapters: PEFT's config and names."""
ADAPTER_MODEL = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
WRAPPER = "model."
"""The prefix of a library's parameters, which plait holds as `.model` of a wrapper."""

LLAMA = (
    (r"embed\.weight", "model.embed_tokens.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"head\.weight", "lm_head.weight"),
    (r"blocks\.(\d+)\.norm1\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.norm2\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blocks\.(\d+)\.attention\.([qkvo])\.weight", r"model.layers.\1.self_attn.\2_proj.weight"),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
)
"""plait's Llama -> the library's `LlamaForCausalLM`."""

LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LLAMA_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
MIXTURE = "num_local_experts"


def llama_tables(keys: JsonMapping) -> JsonObject | None:
    """The `config.json` of plait's Llama, from the keys of `[model]`; None for a mixture.

    >>> llama_tables({"num_local_experts": 8}) is None
    True
    """
    if keys.get(MIXTURE):
        return None
    table = {key: keys[key] for key in LLAMA_SIZES}
    table |= {key: keys.get(key, value) for key, value in LLAMA_DEFAULTS.items()}
    heads = table["num_attention_heads"]
    table["num_key_value_heads"] = keys.get("num_key_value_heads") or heads
    table["head_dim"] = keys.get("head_dim") or table["hidden_size"] // heads
    family = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    return {CONFIG: {**family, **table}}


def export_model(
    source: str | Path,
    out: str | Path,
    dtype: torch.dtype | None = None,
    tables: JsonMapping | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[list[Path], dict[str, str]]:
    """Write the weights of a run or checkpoint; returns the files and the name that each weight
    got.

    A model of the library also gets its `config.json`, so that `from_pretrained` takes the folder.
    It comes from the checkpoint, or from `tables` (file name -> content) where the checkpoint has
    none. Raises `CheckpointError` where there is no checkpoint, and as `export_safetensors`.
    """
    opened = Checkpoint.open(source)
    form = opened.meta.get(ADAPTER)
    if form is not None:
        adapter = write_adapter(opened.directory, Path(out), form["config"], form["names"], dtype)
        return adapter, dict(form["names"])
    weights = [name for name in opened.names() if not name.startswith(NOT_WEIGHTS)]
    tables = opened.meta.get(META, tables)
    names, joined_tensors = library_names(weights, tables)
    files = export_safetensors(
        opened.directory,
        out,
        names=names,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        joined=joined_tensors,
    )
    names = with_joined(names, joined_tensors)
    if tables is not None and Path(out).suffix != ".safetensors":
        saved = dtype or opened.dtype(weights[0])
        files = [*files, *write_tables(Path(out), tables, dtype_name(saved))]
    return files, names


def library_names(
    weights: list[str], tables: JsonMapping | None
) -> tuple[dict[str, str], dict[str, Joined]]:
    """The names of weights in the export, and the tensors there that are made of weights."""
    if _is_gpt2(tables) and (found := gpt2.split(weights)) is not None:
        return found
    is_wrapped = tables is not None and all(name.startswith(WRAPPER) for name in weights)
    return exported_names(weights, is_wrapped=is_wrapped), {}


def with_joined(names: Mapping[str, str], joined: Mapping[str, Joined]) -> dict[str, str]:
    """The name in the export of every weight, those that are parts of one tensor there included."""
    return {**names, **{source: name for name, one in joined.items() for source in one.sources}}


def _is_gpt2(tables: JsonMapping | None) -> bool:
    return tables is not None and tables[CONFIG].get("model_type") == "gpt2"


def write_adapter(
    checkpoint: Path,
    out: Path,
    config: JsonMapping,
    names: Mapping[str, str],
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write the two files of PEFT: the tensors `names` of a checkpoint, and the config."""
    files = export_safetensors(checkpoint, out / ADAPTER_MODEL, names=names, dtype=dtype)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_text_atomic(out / ADAPTER_CONFIG, text)
    return [*files, out / ADAPTER_CONFIG]


def write_tables(folder: Path, tables: JsonMapping, dtype: str) -> list[Path]:
    """Write the files of a library's model; its config says the type that the weights have now."""
    written = []
    for name, table in tables.items():
        whole = {**table, "dtype": dtype} if name == CONFIG else table
        write_text_atomic(folder / name, json.dumps(whole, indent=2, sort_keys=True) + "\n")
        written.append(folder / name)
    return written


def exported_names(names: list[str], *, is_wrapped: bool = False) -> dict[str, str]:
    """The name of each weight in the export. A model of the library loses its wrapper, a dense
    Llama gets that library's names, and others stay unchanged.

    >>> exported_names(["blocks.0.attention.q.weight", "norm.weight"])["norm.weight"]
    'model.norm.weight'
    """
    if is_wrapped or any(name.startswith(2 * WRAPPER) for name in names):
        return {name: name.removeprefix(WRAPPER) for name in names}
    renamed = {name: new for name in names if (new := _renamed(name)) is not None}
    return renamed if len(renamed) == len(names) else {name: name for name in names}


def _renamed(name: str) -> str | None:
    for pattern, replacement in LLAMA:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return None
