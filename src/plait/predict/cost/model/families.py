"""Differences of the transformer families of Hugging Face beside their sizes: norms, biases, gates,
positions, tied tables.

One row a family, so that a pasted config.json counts its weights exactly. Tests hold each row
against the family's own code. A feature that is not in a row is Llama's. Those are RMS norms, gated
feed-forward networks, rotary positions, no biases, an own output table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from plait.values import JsonMapping, JsonObject


@dataclass(frozen=True)
class Traits:
    """One family. Biases are of the projections of attention (inputs, output) and of the
    feed-forward network.
    """

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: int = 1
    """Weights of a norm for each feature: 1 RMSNorm, 2 LayerNorm, 0 none."""
    norms: int = 2
    """Norms of a layer: 1 where attention and feed-forward network share one, 4 where both are also
    normed after.
    """
    final_norm: bool = True
    qk_norm: str = ""
    """Norms of queries and keys: one for every `head` in turn, one for `each` head, one over the
    `whole` width.
    """
    head_bias: bool = False
    embedding_norm: bool = False
    positions: bool = False
    """A learned table of positions, with `position_offset` more rows than positions."""
    position_offset: int = 0
    rotary: bool = True
    token_types: int = 0
    tied: bool = False
    causal: bool = True
    fused: bool = False
    """Query, key and value (and gate and up) are one matrix."""
    transformed_head: bool = False
    """A dense layer and a norm stand before the output table."""
    shared_gate: bool = False
    """The shared expert has a gate."""
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    """A number for each head that its softmax adds."""


LLAMA: Final = Traits()
GPT: Final = Traits(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm=2, rotary=False)
_ROTARY: Final = replace(GPT, rotary=True)
_BERT: Final = replace(
    GPT,
    positions=True,
    embedding_norm=True,
    final_norm=False,
    token_types=2,
    tied=True,
    causal=False,
    transformed_head=True,
)

FAMILIES: Final[dict[str, Traits]] = {
    "bert": replace(_BERT, head_bias=True),
    "biogpt": replace(GPT, positions=True, position_offset=2, tied=True),
    "bloom": replace(GPT, embedding_norm=True, tied=True, fused=True),
    "codegen": replace(
        _ROTARY, qkv_bias=False, out_bias=False, norms=1, head_bias=True, fused=True
    ),
    "cohere": replace(LLAMA, norms=1, tied=True),
    "cohere2": replace(LLAMA, norms=1, tied=True),
    "exaone4": replace(LLAMA, qk_norm="head"),
    "falcon": replace(GPT, rotary=True, tied=True, fused=True),
    "gemma": replace(LLAMA, tied=True),
    "gemma2": replace(LLAMA, norms=4, tied=True),
    "gemma3": replace(LLAMA, norms=4, qk_norm="head", tied=True),
    "gemma3_text": replace(LLAMA, norms=4, qk_norm="head", tied=True),
    "glm": replace(LLAMA, qkv_bias=True, fused=True),
    "glm4": replace(LLAMA, qkv_bias=True, norms=4, fused=True),
    "glm4_moe": LLAMA,
    "gpt": replace(GPT, positions=True),
    "gpt2": replace(GPT, positions=True, tied=True, fused=True),
    "gpt_bigcode": replace(GPT, positions=True, tied=True, fused=True),
    "gpt_neo": replace(GPT, qkv_bias=False, positions=True, tied=True),
    "gpt_neox": replace(_ROTARY, fused=True),
    "gpt_oss": replace(
        LLAMA, qkv_bias=True, out_bias=True, router_bias=True, expert_bias=True, sinks=True
    ),
    "gptj": replace(_ROTARY, qkv_bias=False, out_bias=False, norms=1, head_bias=True),
    "hunyuan_v1_dense": replace(LLAMA, qk_norm="head"),
    "mpt": replace(
        GPT, qkv_bias=False, out_bias=False, mlp_bias=False, norm=1, tied=True, fused=True
    ),
    "nemotron": replace(LLAMA, gated=False, norm=2),
    "olmo": replace(LLAMA, norm=0),
    "olmo2": replace(LLAMA, qk_norm="whole"),
    "olmo3": replace(LLAMA, qk_norm="whole"),
    "olmoe": replace(LLAMA, qk_norm="whole"),
    "opt": replace(GPT, positions=True, position_offset=2, tied=True),
    "persimmon": replace(_ROTARY, qk_norm="head", fused=True),
    "phi": replace(_ROTARY, norms=1, head_bias=True),
    "phi3": replace(LLAMA, fused=True),
    "phimoe": replace(LLAMA, norm=2),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen2_moe": replace(LLAMA, qkv_bias=True, shared_gate=True),
    "qwen3": replace(LLAMA, qk_norm="head"),
    "qwen3_moe": replace(LLAMA, qk_norm="head"),
    "roberta": replace(_BERT, token_types=1, head_bias=True),
    "seed_oss": replace(LLAMA, qkv_bias=True),
    "smollm3": replace(LLAMA, tied=True),
    "stablelm": replace(LLAMA, norm=2),
    "starcoder2": replace(_ROTARY, tied=True),
    "xglm": replace(GPT, tied=True),
}
"""Families that differ from Llama's."""

LIKE_LLAMA: Final = frozenset(
    {
        *(
            "llama",
            "mistral",
            "mixtral",
            "ministral",
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "granite",
            "granitemoe",
        ),
        *("ernie4_5", "llama4", "llama4_text", "aquila", "yi", "internlm2", "minicpm", "arcee"),
    }
)


def is_known(family: str) -> bool:
    """Whether a family has a row, or is known to have Llama's."""
    return family in FAMILIES or family in LIKE_LLAMA


def traits_of(family: str, model: JsonMapping) -> Traits:
    """A family as a config's own keys change it."""
    traits = FAMILIES.get(family, LLAMA)
    if family == "falcon":
        traits = _falcon(traits, model)
    if family == "gpt" and model.get("model_type") == "gpt2":
        traits = replace(traits, tied=True)  # the library's default, which its files leave out
    if family == "opt" and not model.get("do_layer_norm_before", True):
        traits = replace(traits, final_norm=False)
    if family == "stablelm" and model.get("use_parallel_residual"):
        traits = replace(traits, norms=1)
    for key, switched in _SWITCHES.items():
        names = switched
        if key == "attention_bias" and family in _NO_OUTPUT_BIAS:
            names = ("qkv_bias",)
        if isinstance(model.get(key), bool):
            switches: JsonObject = dict.fromkeys(names, model[key])
            traits = replace(traits, **switches)
    if isinstance(model.get("use_qk_norm"), bool) and not family.startswith(
        "llama4"
    ):  # Llama 4's has no weights
        each = "each" if family.startswith("cohere") else "head"
        traits = replace(traits, qk_norm=(traits.qk_norm or each) if model["use_qk_norm"] else "")
    if model.get("qk_layernorm") is False:
        traits = replace(traits, qk_norm="")
    if isinstance(model.get("tie_word_embeddings"), bool):
        traits = replace(traits, tied=model["tie_word_embeddings"])
    return traits


DEFAULTS: Final[Mapping[str, JsonObject]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    }
}
"""Sizes that the published config.json of a family leaves out: the defaults of transformers'
`Gemma3TextConfig`.
"""
_NO_OUTPUT_BIAS: Final = frozenset({"glm", "glm4", "glm4_moe"})
_SWITCHES: Final = {
    "attention_bias": ("qkv_bias", "out_bias"),
    "attention_out_bias": ("out_bias",),
    "use_qkv_bias": ("qkv_bias",),
    "qkv_bias": ("qkv_bias",),
    "mlp_bias": ("mlp_bias",),
    "use_bias": ("qkv_bias", "out_bias", "mlp_bias"),
    "enable_bias": ("qkv_bias", "out_bias", "mlp_bias"),
    "lm_head_bias": ("head_bias",),
}
"""Keys of configs that turn biases on and off."""


def _falcon(traits: Traits, model: Mapping[str, object]) -> Traits:
    bias = bool(model.get("bias", False))
    parallel = bool(model.get("parallel_attn", True))
    new = bool(model.get("new_decoder_architecture", False))
    norms = (
        1 if parallel and (model.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 1 else 2
    )
    return replace(
        traits,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norms=norms,
        rotary=not model.get("alibi", False),
    )
