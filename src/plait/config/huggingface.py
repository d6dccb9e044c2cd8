"""A pasted Hugging Face config.json, for the families that are written here: gpt and llama.

There are three kinds of keys beside the sizes. Those without effect on the mathematics of training
are dropped. Others have another name here. Those that would change the mathematics must have the
one value that is implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from plait.errors import nearest
from plait.values import JsonObject

MODEL_TYPES: Final = {
    "gpt2": "gpt",
    "gpt": "gpt",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
}
"""The `model_type`s whose mathematics is that of a model here."""

NO_EFFECT: Final = frozenset(
    {
        *(
            "architectures",
            "_name_or_path",
            "name_or_path",
            "transformers_version",
            "tokenizer_class",
            "auto_map",
            "prefix",
        ),
        *(
            "torch_dtype",
            "dtype",
            "torchscript",
            "attn_implementation",
            "_attn_implementation",
            "gradient_checkpointing",
        ),
        *(
            "use_cache",
            "is_decoder",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "n_ctx",
            "max_window_layers",
        ),
        *("pretraining_tp", "task_specific_params", "finetuning_task", "problem_type"),
        *("id2label", "label2id"),
    }
)
"""Metadata, caches, decoding, and what only counts when another key below switches it on."""

NO_EFFECT_PARTS: Final = ("_token_id", "_token_ids", "summary_")

ALIASES: Final = {
    "gpt": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
    },
    "llama": {
        "num_experts": "num_local_experts",
        "n_routed_experts": "num_local_experts",
        "n_shared_experts": "num_shared_experts",
    },
}

MUST_BE: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "gpt": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "hidden_act": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0,),
        "rope_scaling": (),
        "sliding_window": (),
        "use_sliding_window": (False,),
        "output_router_logits": (
            False,
        ),  # its balance loss pools the layers; ours is a sum of one a layer
        "moe_layer_freq": (1,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "router_jitter_noise": (0,),
        "partial_rotary_factor": (1,),
        "quantization_config": (),
    },
}
"""Keys whose other values would be another model; null always means the value that is
implemented.
"""

_DROPOUTS: Final = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def digest(family: str, keys: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The keys as this project names them, and one message for each that would be another model."""
    left = {
        key: value for key, value in keys.items() if value is not None and not has_no_effect(key)
    }
    faults: list[str] = []
    for step in (_balance_loss, _model_type, _dropouts, _rope, _layer_types, _fixed, _aliases):
        faults += step(family, left)
    return left, faults


def has_no_effect(key: str) -> bool:
    """Whether a key says nothing about the mathematics of training, as `bos_token_id`."""
    return key in NO_EFFECT or any(part in key for part in NO_EFFECT_PARTS)


def _balance_loss(family: str, keys: dict[str, object]) -> list[str]:
    """A saved config carries the coefficient always, and its library uses it only with
    `output_router_logits`.
    """
    if "model_type" in keys:
        keys.pop("router_aux_loss_coef", None)
    return []


def _model_type(family: str, keys: JsonObject) -> list[str]:
    model_type = keys.pop("model_type", None)
    if model_type is None:
        return []
    if MODEL_TYPES.get(model_type) != family:
        known = [name for name, of in MODEL_TYPES.items() if of == family]
        return [
            f"model.model_type {model_type!r} is not what model '{family}' computes "
            f"({', '.join(known)} are); "
            'write name = "hf" with config = {model_type = ...} to train it as it is'
        ]
    if model_type == "gpt2":
        keys.setdefault(
            "tie_word_embeddings", True
        )  # the library's default, which its files leave out
    return []


def _dropouts(family: str, keys: dict[str, object]) -> list[str]:
    """GPT-2 names three rates of dropout; here one rate serves all three places."""
    if family != "gpt":
        return []
    rates = {name: keys.pop(name) for name in _DROPOUTS if name in keys}
    if len(set(map(repr, rates.values()))) > 1:
        spelled = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        return [
            f"model.dropout is one rate for attention, embedding and residual, but {spelled} "
            "differ; make them equal"
        ]
    for rate in rates.values():
        keys.setdefault("dropout", rate)
    return []


def _rope(family: str, keys: JsonObject) -> list[str]:
    """Newer files keep `rope_theta` in a table of rotary parameters, and say that nothing is scaled
    in words.
    """
    faults = []
    for name in ("rope_parameters", "rope_scaling"):
        table = keys.get(name)
        if family != "llama" or not isinstance(table, Mapping):
            continue
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            faults.append(
                f"model.{name} of type {kind!r} is not implemented, only unscaled rotary "
                "positions; leave it out"
            )
        elif "rope_theta" in table:
            keys.setdefault("rope_theta", table["rope_theta"])
        del keys[name]
    if isinstance(keys.get("rope_theta"), int):
        keys["rope_theta"] = float(keys["rope_theta"])
    return faults


def _layer_types(family: str, keys: JsonObject) -> list[str]:
    types = keys.pop("layer_types", None)
    others = [kind for kind in types or [] if kind != "full_attention"]
    return (
        [f"model.layer_types has {others[0]!r}, but model '{family}' attends fully in every layer"]
        if others
        else []
    )


def _fixed(family: str, keys: dict[str, object]) -> list[str]:
    faults = []
    for key, values in MUST_BE[family].items():
        if key not in keys:
            continue
        value = keys.pop(key)
        if value not in values:
            only = " or ".join(map(repr, values)) if values else "nothing else than null"
            faults.append(
                f"model.{key} = {value!r} would be another model: '{family}' implements {only}"
            )
    return faults


def _aliases(family: str, keys: dict[str, object]) -> list[str]:
    faults = []
    for alias, name in ALIASES[family].items():
        if alias not in keys:
            continue
        value = keys.pop(alias)
        if keys.setdefault(name, value) != value:
            faults.append(
                f"model.{alias} = {value!r} and model.{name} = {keys[name]!r} are one thing; keep "
                "one"
            )
    return faults


def known_keys(family: str) -> frozenset[str]:
    """The keys that `digest` reads of a family, beside the family's own."""
    if family not in MUST_BE:
        return frozenset()
    read = {"model_type", "rope_parameters", "layer_types", *_DROPOUTS}
    return frozenset({*read, *MUST_BE[family], *ALIASES[family]})


def family_of(model_type: object) -> str | None:
    """The model here that computes what a pasted `model_type` names, if there is one."""
    return MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None


def unknown_model_type(model_type: object) -> str:
    """The refusal of a pasted config whose family plait does not have."""
    return (
        f"model.name is missing, and model_type {model_type!r} is none that is written here; "
        f'{nearest(str(model_type), MODEL_TYPES)} (name = "hf" with config = ... trains any of '
        "transformers)"
    )
