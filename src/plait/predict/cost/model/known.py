"""Known models by name: the `[model]` tables of their published config.json files.

Each row names its source. `seq_len` is the length of a training sample that a question begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plait.errors import ConfigError, nearest
from plait.values import JsonMapping, JsonObject


@dataclass(frozen=True)
class KnownModel:
    """One model: the keys of its config.json that the cost model reads, and their source."""

    source: str
    seq_len: int
    model: JsonMapping

    @property
    def tables(self) -> JsonMapping:
        """The tables of a config."""
        return {"model": dict(self.model), "data": {"seq_len": self.seq_len}}


def _sizes(
    model_type: str, layers: int, hidden: int, heads: tuple[int, int], vocab: int, **more: object
) -> JsonObject:
    """A config.json; `heads` are those of queries and of keys."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        **more,
    }


def _llama(layers: int, hidden: int, heads: tuple[int, int], inner: int) -> JsonObject:
    return _sizes("llama", layers, hidden, heads, 128256, intermediate_size=inner)


def _gpt2(layers: int, hidden: int, heads: int, positions: int) -> JsonObject:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 50257,
    }


def _mixtral(layers: int, hidden: int, heads: tuple[int, int], inner: int) -> JsonObject:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _sizes("mixtral", layers, hidden, heads, 32000, intermediate_size=inner, **experts)


def _qwen3_moe(layers: int, hidden: int, heads: tuple[int, int], inner: int) -> JsonObject:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    return _sizes("qwen3_moe", layers, hidden, heads, 151936, head_dim=128, **experts)


DEEPSEEK_V3: Final = _sizes(
    "deepseek_v3",
    61,
    7168,
    (128, 128),
    129280,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
QWEN25_7B: Final = _sizes("qwen2", 28, 3584, (28, 4), 152064, intermediate_size=18944)
QWEN3_8B: Final = _sizes("qwen3", 36, 4096, (32, 8), 151936, head_dim=128, intermediate_size=12288)
MISTRAL_7B: Final = _sizes("mistral", 32, 4096, (32, 8), 32000, intermediate_size=14336)

KNOWN: Final[dict[str, KnownModel]] = {
    "llama3-8b": KnownModel("meta-llama/Meta-Llama-3-8B", 8192, _llama(32, 4096, (32, 8), 14336)),
    "llama3-70b": KnownModel("meta-llama/Meta-Llama-3-70B", 8192, _llama(80, 8192, (64, 8), 28672)),
    "llama3-405b": KnownModel(
        "meta-llama/Llama-3.1-405B", 8192, _llama(126, 16384, (128, 8), 53248)
    ),
    "mistral-7b": KnownModel("mistralai/Mistral-7B-v0.1", 8192, MISTRAL_7B),
    "mixtral-8x7b": KnownModel(
        "mistralai/Mixtral-8x7B-v0.1", 4096, _mixtral(32, 4096, (32, 8), 14336)
    ),
    "mixtral-8x22b": KnownModel(
        "mistralai/Mixtral-8x22B-v0.1", 4096, _mixtral(56, 6144, (48, 8), 16384)
    ),
    "deepseek-v3": KnownModel("deepseek-ai/DeepSeek-V3", 4096, DEEPSEEK_V3),
    "qwen2.5-7b": KnownModel("Qwen/Qwen2.5-7B", 4096, QWEN25_7B),
    "qwen3-8b": KnownModel("Qwen/Qwen3-8B", 4096, QWEN3_8B),
    "qwen3-30b-a3b": KnownModel("Qwen/Qwen3-30B-A3B", 4096, _qwen3_moe(48, 2048, (32, 4), 768)),
    "qwen3-235b-a22b": KnownModel(
        "Qwen/Qwen3-235B-A22B", 4096, _qwen3_moe(94, 4096, (64, 4), 1536)
    ),
    "gpt2": KnownModel("openai-community/gpt2", 1024, _gpt2(12, 768, 12, 1024)),
    "gpt2-xl": KnownModel("openai-community/gpt2-xl", 1024, _gpt2(48, 1600, 25, 1024)),
    "gpt3-175b": KnownModel("Brown et al. 2020, table 2.1", 2048, _gpt2(96, 12288, 96, 2048)),
}


def known_tables(name: str) -> JsonMapping:
    """The tables of a known model. Errors: `ConfigError` for a name that is no known model's."""
    if name.lower() not in KNOWN:
        raise ConfigError(
            f"'{name}' is neither a file nor a known model; {nearest(name.lower(), KNOWN)}"
        )
    return KNOWN[name.lower()].tables
