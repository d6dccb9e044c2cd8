"""plait's GPT under the names of the library's `GPT2LMHeadModel`.

The mathematics is the same; two things differ in the files. The library has query, key and value in
one matrix, and writes the matrices of its blocks with inputs first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plait.checkpoint.export import Joined
from plait.values import JsonMapping, JsonObject

SIMPLE = (
    (r"embed\.weight", "transformer.wte.weight"),
    (r"position\.weight", "transformer.wpe.weight"),
    (r"norm\.(weight|bias)", r"transformer.ln_f.\1"),
    (r"head\.weight", "lm_head.weight"),
    (r"blocks\.(\d+)\.norm([12])\.(weight|bias)", r"transformer.h.\1.ln_\2.\3"),
    (r"blocks\.(\d+)\.attention\.o\.bias", r"transformer.h.\1.attn.c_proj.bias"),
    (r"blocks\.(\d+)\.mlp\.up\.bias", r"transformer.h.\1.mlp.c_fc.bias"),
    (r"blocks\.(\d+)\.mlp\.down\.bias", r"transformer.h.\1.mlp.c_proj.bias"),
)
"""Tensors that are written as they are."""

TURNED = (
    (r"blocks\.(\d+)\.attention\.o\.weight", r"transformer.h.\1.attn.c_proj.weight"),
    (r"blocks\.(\d+)\.mlp\.up\.weight", r"transformer.h.\1.mlp.c_fc.weight"),
    (r"blocks\.(\d+)\.mlp\.down\.weight", r"transformer.h.\1.mlp.c_proj.weight"),
)
"""Matrices that are written with inputs first."""

PACKED = r"blocks\.(\d+)\.attention\.[qkv]\.(weight|bias)"

DEFAULTS: JsonObject = {
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "dropout": 0.0,
}
KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
    "embd_pdrop": "dropout",
    "attn_pdrop": "dropout",
    "resid_pdrop": "dropout",
}
"""The library's keys, and those of `[model]`."""


def tables(keys: JsonMapping) -> JsonObject:
    """The `config.json` of plait's GPT, from the keys of `[model]`."""
    given = {key: value for key, value in keys.items() if value is not None}
    values = {**DEFAULTS, **given}
    table = {theirs: values[ours] for theirs, ours in KEYS.items()}
    family = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    inner = given.get("intermediate_size") or 4 * table["n_embd"]
    # The library's numbers of these tokens are those of its own vocabulary.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return {
        "config.json": {
            **family,
            **tokens,
            **table,
            "n_inner": inner,
            "activation_function": "gelu_new",
        }
    }


def split(names: Sequence[str]) -> tuple[dict[str, str], dict[str, Joined]] | None:
    """(the tensors that only get another name, those that are made), for the weights of a GPT.

    None where the names are not a GPT's.
    """
    same: dict[str, str] = {}
    joined: dict[str, Joined] = {}
    for name in names:
        if new := _renamed(name, SIMPLE):
            same[name] = new
        elif new := _renamed(name, TURNED):
            joined[new] = Joined((name,), transposed=True)
        elif packed := re.fullmatch(PACKED, name):
            block, kind = packed.groups()
            parts = tuple(f"blocks.{block}.attention.{part}.{kind}" for part in "qkv")
            new = f"transformer.h.{block}.attn.c_attn.{kind}"
            joined[new] = Joined(parts, transposed=kind == "weight")
        else:
            return None
    return same, joined


def _renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str | None:
    for pattern, replacement in patterns:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return None
