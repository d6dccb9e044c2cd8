"""A checkpoint's weights under the names of Hugging Face: what `from_pretrained` of the same
architecture reads.

plait keeps query, key and value apart and turns halves against halves as that library's Llama does,
so a dense Llama is a matter of names. Other models keep the names they have, and those that came
from the library already have its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint.export import export_safetensors
from plait.checkpoint.folder import resolve
from plait.checkpoint.piece import RANDOM_PREFIX
from plait.checkpoint.read import Checkpoint

if TYPE_CHECKING:
    import torch

NOT_WEIGHTS = ("optimizer/", "strategy/", RANDOM_PREFIX)
WRAPPED = "model.model."
"""How parameters of a Hugging Face model begin that plait holds as `.model`."""

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


def export_model(
    source: str | Path, out: str | Path, dtype: torch.dtype | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Write the weights of a run or checkpoint; returns the files and the name that each weight
    got.

    Raises `CheckpointError` where there is no checkpoint, and as `export_safetensors`.
    """
    checkpoint = resolve(source)
    names = exported_names(
        [name for name in Checkpoint.open(checkpoint).names() if not name.startswith(NOT_WEIGHTS)]
    )
    return export_safetensors(checkpoint, out, names=names, dtype=dtype), names


def exported_names(names: list[str]) -> dict[str, str]:
    """The name of each weight in the export: a dense Llama's if all of them are one's, else as they
    are.

    >>> exported_names(["blocks.0.attention.q.weight", "norm.weight"])["norm.weight"]
    'model.norm.weight'
    """
    if any(name.startswith(WRAPPED) for name in names):
        return {name: name.removeprefix("model.") for name in names}
    renamed = {name: new for name in names if (new := _renamed(name)) is not None}
    return renamed if len(renamed) == len(names) else {name: name for name in names}


def _renamed(name: str) -> str | None:
    for pattern, replacement in LLAMA:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return None
