"""A model description from a config's keys: plait's own names, a pasted Hugging Face config.json,
or a meta module.

Describing allocates nothing, so a trillion parameters take as long as a thousand. One table maps
what families call things.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import ModelError
from plait.predict.cost.model.families import DEFAULTS, is_known, traits_of
from plait.predict.cost.model.from_config import describe_made, is_made
from plait.predict.cost.model.operations import ATTENTION_KERNELS, LARGE, Model
from plait.predict.cost.model.transformer import Transformer, transformer_model
from plait.predict.cost.model.vision import mlp_model, resnet_model
from plait.toml import parse_json
from plait.values import JsonMapping, JsonValue

ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("multi_query_group_num", "num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_top_k", "num_experts_per_token", "top_k"),
    "num_shared_experts": ("n_shared_experts",),
    "num_dense_layers": ("first_k_dense_replace",),
    "moe_every": ("decoder_sparse_step", "moe_layer_freq"),
}
"""plait's name of a key, and what config.json files of other families call it."""

DESCRIBED = frozenset(
    {
        *(
            "num_key_value_heads",
            "head_dim",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ),
        *(
            "num_shared_experts",
            "shared_expert_intermediate_size",
            "num_dense_layers",
            "moe_every",
            "max_position_embeddings",
        ),
        *(
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "tie_word_embeddings",
        ),
        *(
            "attention_dropout",
            "hidden_dropout",
            "attn_pdrop",
            "resid_pdrop",
            "embd_pdrop",
            "dropout",
            "hidden_act",
        ),
        *(
            "fused_cross_entropy",
            "activation_function",
            "attention_bias",
            "mlp_bias",
            "rope_scaling",
            "rope_theta",
            "rms_norm_eps",
            "model_type",
        ),
    }
)
"""Keys that a description reads or may ignore beside those of plait's own models."""

GPT_POSITIONS = 1024

LARGEST = {"num_hidden_layers": 100_000}
LARGEST_SIZE = 10**12
"""Sizes above these are slips: a zero too many, a number of bytes."""
MAY_BE_ZERO = frozenset(
    {
        "num_local_experts",
        "num_shared_experts",
        "num_dense_layers",
        "num_key_value_heads",
        "moe_every",
    }
)
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OWN_SIZES = (
    *(
        "head_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "word_embed_proj_dim",
        "intermediate_size_mlp",
    ),
    *LATENT_SIZES,
)
RATES = (
    "attention_dropout",
    "hidden_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "resid_pdrop",
    "dropout",
)


def describe(config: Any, seq_len: int | None = None) -> Model:
    """The description of `config`: a mapping with a `[model]` table, the table itself, or a torch
    module.

    `seq_len` overrides the length of a sample, in tokens. Raises `ModelError` for a family or a key
    that is missing.
    """
    if hasattr(config, "named_modules"):
        return describe_module(config, seq_len or 1)
    model = config.get("model", config) if isinstance(config, Mapping) else config
    data = config.get("data", {}) if isinstance(config, Mapping) and "model" in config else {}
    if hasattr(model, "named_modules"):
        return describe_module(model, int(seq_len or data.get("seq_len") or 1))
    length = seq_len or data.get("seq_len") or 0
    if is_made(model) and not _get(model, "num_attention_heads"):
        return describe_made(model, data, int(length))
    image = {"image_size": data["image_size"]} if data.get("image_size") else {}
    return describe_keys({**model, **image}, int(length))


def describe_keys(model: JsonMapping, seq_len: int) -> Model:
    """The description of a `[model]` table or a config.json; `seq_len` 0 means its longest
    position.

    Raises:
        ModelError: a model without formulae, or an incomplete table.
    """
    family = str(model.get("name") or model.get("model_type") or "llama")
    if family == "hf":
        table = library_config(model)
        return describe_keys({**table, "name": str(table.get("model_type", "llama"))}, seq_len)
    if family == "mlp":
        sizes = {
            key: int(_need(model, key, family))
            for key in ("in_features", "hidden_size", "num_hidden_layers", "out_features")
        }
        return mlp_model(**sizes)
    if family == "resnet":
        image = int(model.get("image_size") or (8 if model.get("in_channels") == 1 else 32))
        keys = {"depth": 18, "num_classes": 1000, "width": 64, "in_channels": 3}
        sizes = {key: int(model.get(key, default)) for key, default in keys.items()}
        return resnet_model(**sizes, image=image)
    text = model.get("text_config")
    if isinstance(text, Mapping):  # of a model that also sees or hears: its language model
        return describe_keys(
            {"model_type": family, **text, "name": str(text.get("model_type") or family)}, seq_len
        )
    if model.get("is_encoder_decoder"):
        raise ModelError(
            f"model {family!r} has an encoder and a decoder, which have no formulae here; "
            "name the code that makes it in [model]: python = 'module:function'"
        )
    shape = transformer_shape(model, family)
    return transformer_model(
        family, shape, seq_len or int(_get(model, "max_position_embeddings") or 2048)
    )


def library_config(model: JsonMapping) -> JsonMapping:
    """The config that a model "hf" names or holds. Errors: `ModelError` where it does neither."""
    inner = model.get("config")
    table = _read(inner) if isinstance(inner, (str, Path)) else inner
    if not isinstance(table, Mapping):
        raise ModelError(
            'model "hf" needs config = "path/config.json" or an inline table with model_type'
        )
    return table


def _read(path: str | Path) -> object:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(f"the config {str(file)!r} cannot be read as JSON: {cause}") from None


def wrong_sizes(model: Mapping[str, object]) -> Iterator[str]:
    """A sentence for each size that is no count."""
    family = model.get("model_type")
    if family is not None and not isinstance(family, str):
        yield f"model.model_type = {family!r} must be a name, such as 'llama'"
    names = [
        (key, name)
        for key in (*ALIASES, *OWN_SIZES, "vocab_size")
        for name in (key, *ALIASES.get(key, ()))
    ]
    for key, name in names:
        value = model.get(name)
        least = 0 if key in MAY_BE_ZERO or key in OWN_SIZES else 1
        if value is None or (name == "moe_layer_freq" and isinstance(value, (list, tuple))):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"model.{name} = {value!r} must be a whole number"
        elif not least <= value <= LARGEST.get(key, LARGEST_SIZE):
            yield (
                f"model.{name} = {value} must be between {least} and "
                f"{LARGEST.get(key, LARGEST_SIZE)}"
            )
    for rate in RATES:
        value = model.get(rate)
        if value is not None and (not isinstance(value, (int, float)) or not 0 <= value <= 1):
            yield f"model.{rate} = {value!r} must be a number from 0 to 1"


def _uneven(shape: Transformer) -> Iterator[str]:
    heads = shape.num_attention_heads
    groups = shape.kv_heads
    if not shape.head_dim and not shape.kv_lora_rank and shape.hidden_size % heads:
        yield f"hidden_size {shape.hidden_size} must be a multiple of num_attention_heads {heads}"
    if not shape.kv_lora_rank and heads % groups:
        yield f"num_attention_heads {heads} must be a multiple of num_key_value_heads {groups}"
    if shape.num_experts_per_tok > shape.num_experts:
        yield (
            f"num_experts_per_tok {shape.num_experts_per_tok} is more than the "
            f"{shape.num_experts} experts"
        )
    if shape.kv_lora_rank and not (
        shape.qk_nope_head_dim + shape.qk_rope_head_dim and shape.v_head_dim
    ):
        yield "kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"


def transformer_shape(model: JsonMapping, family: str) -> Transformer:
    """The sizes of a transformer from the keys of its family, defaults filled as that family fills
    them.

    Raises `ModelError` listing every size that cannot be.
    """
    wrong = list(wrong_sizes(model))
    if wrong:
        raise ModelError("\n  ".join(wrong))
    model = {**DEFAULTS.get(family, {}), **model}
    traits = traits_of(family, model)
    hidden = int(_need(model, "hidden_size", family))
    heads = int(_need(model, "num_attention_heads", family))
    inner = int(_get(model, "intermediate_size") or 4 * hidden)
    experts = int(_get(model, "num_local_experts") or 0)
    moe_inner = int(model.get("moe_intermediate_size") or inner)
    shared = int(model.get("shared_expert_intermediate_size") or 0) or moe_inner * int(
        _get(model, "num_shared_experts") or 0
    )
    if family in {"llama4", "llama4_text"}:
        inner = int(model.get("intermediate_size_mlp") or inner)
        shared = moe_inner
    kernel = str(model.get("attn_implementation") or model.get("_attn_implementation") or "sdpa")
    fused = kernel != "eager"
    positions = (
        int(_get(model, "max_position_embeddings") or GPT_POSITIONS) if traits.positions else 0
    )
    every = model.get("interleave_moe_layer_step") or _get(model, "moe_every")
    lean = model.get("fused_cross_entropy") == LARGE
    shape = Transformer(
        hidden_size=hidden,
        num_hidden_layers=int(_need(model, "num_hidden_layers", family)),
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=int(_need(model, "vocab_size", family)),
        num_key_value_heads=_kv_heads(model),
        head_dim=int(model.get("head_dim") or 0),
        traits=traits,
        table_width=int(model.get("word_embed_proj_dim") or hidden),
        fused_attention=fused,
        attention_kernel=ATTENTION_KERNELS.get(kernel, "portable"),
        dropout=any(float(model.get(rate) or 0) > 0 for rate in RATES) and not fused,
        max_positions=positions + traits.position_offset if positions else 0,
        fused_loss=bool(model.get("fused_cross_entropy")) and not lean,
        loss_by_rows=lean,
        num_experts=experts,
        num_experts_per_tok=int(_get(model, "num_experts_per_tok") or (2 if experts else 0)),
        moe_intermediate_size=moe_inner,
        shared_intermediate_size=shared if experts else 0,
        num_dense_layers=int(_get(model, "num_dense_layers") or 0),
        moe_every=max(1, int(every)) if isinstance(every, int) else 1,
        **{key: int(model.get(key) or 0) for key in LATENT_SIZES},
    )
    uneven = list(_uneven(shape))
    if uneven:
        raise ModelError("\n  ".join(f"model: {fault}" for fault in uneven))
    return shape


def _kv_heads(model: JsonMapping) -> int:
    family = model.get("model_type", model.get("name"))
    if family in {"falcon", "gpt_bigcode"} and not model.get("new_decoder_architecture"):
        return 1 if model.get("multi_query", True) else 0
    if model.get("multi_query") and not model.get("new_decoder_architecture"):
        return 1
    return int(_get(model, "num_key_value_heads") or 0)


def _get(model: JsonMapping, key: str) -> JsonValue:
    for name in (key, *ALIASES.get(key, ())):
        if model.get(name) is not None:
            return model[name]
    return None


def _need(model: JsonMapping, key: str, family: str) -> JsonValue:
    value = _get(model, key)
    if value is None and not is_known(family):
        raise ModelError(
            f"model {family!r} has no formulae here, and its config has no {key!r}; name the code "
            "that makes it in [model]: python = 'module:function'"
        )
    if value is None:
        raise ModelError(
            f"model {family!r} needs the key {key!r} to be described; add it (a config.json may "
            "leave out what has its default)"
        )
    return value


def describe_module(module: Any, seq_len: int = 1, roles: Mapping[str, str] | None = None) -> Model:
    """The description of a torch module, usually on the meta device.

    A Hugging Face model of a known family is described by its own config. Any other is described
    from a forward on the meta device (`plait.predict.cost.model.modules`). One that cannot run
    there, because it depends on values, is described from its layers alone
    (`plait.predict.cost.model.from_leaves`).
    """
    table = _own_config(module)
    if table is not None and is_known(str(table["name"])) and not table.get("is_encoder_decoder"):
        return describe_keys(table, seq_len)
    from plait.predict.cost.model.from_leaves import describe_by_leaves
    from plait.predict.cost.model.modules import describe_by_running

    torch = sys.modules.get("torch")  # a module exists, so it is loaded
    if torch is None or not isinstance(module, torch.nn.Module):
        return describe_by_leaves(module, seq_len)
    try:
        return describe_by_running(module, seq_len, roles)
    except ModelError:
        return describe_by_leaves(module, seq_len)


def _own_config(module: Any) -> Mapping[str, object] | None:
    """The config.json of a Hugging Face model, or of one that a wrapper holds as `model`, if it has
    the sizes.
    """
    for holder in (module, getattr(module, "model", None)):
        to_dict = getattr(getattr(holder, "config", None), "to_dict", None)
        if callable(to_dict):
            table = dict(to_dict())
            sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if all(_get(table, key) is not None for key in sizes):
                return {**table, "name": str(table.get("model_type", "llama"))}
    return None
