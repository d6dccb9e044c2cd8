"""Every causal family of `transformers` from a tiny config, and what it starts from.

`python -m tests.unit.models.hf_families [FAMILY ...]` builds all that can be built from a tiny
config, with fresh memory that is NaN, and lists those that start from memory that nobody wrote.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.state.init import Initializer, place_holders
from plait.errors import ModelError
from plait.models import hf

_ENDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
_WIDTH = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32)
_INNER = dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "encoder_ffn_dim", "decoder_ffn_dim", "dff", "d_inner", "intermediate_size_mlp",
    ),
    48,
)  # fmt: skip
_DEPTH = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    2,
)
_HEADS = dict.fromkeys(
    (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    4,
)  # fmt: skip
_EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
) | dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "num_key_value_heads"), 2)
_OTHERS = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "n_positions": 32,
    "head_dim": 8,
    "layer_types": None,
    "mlp_layer_types": None,
    "rope_parameters": None,
}
TINY: dict[str, Any] = {**_ENDS, **_WIDTH, **_INNER, **_DEPTH, **_HEADS, **_EXPERTS, **_OTHERS}
LARGEST = 30_000_000
SAMPLE = ["openai-gpt", "apertus", "gpt2", "llama", "qwen3_moe", "gpt_neox", "bloom", "mamba"]


def families() -> list[str]:
    """The model types that the library registers for causal language models."""
    auto: Any = hf.library().models.auto.modeling_auto
    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(family: str) -> dict[str, Any]:
    """A config of the family whose sizes, as far as they have usual names, are small."""
    known = hf.library().models.auto.configuration_auto.CONFIG_MAPPING[family]().to_dict()
    keys = {key: value for key, value in TINY.items() if known.get(key) is not None}
    return {
        "model_type": family,
        **{key: value for key, value in keys.items() if value is not None},
    }


def start(family: str) -> dict[str, Tensor]:
    """Parameters and buffers of the family as an engine begins with them, by name."""
    model = hf.make(tiny(family))
    numel = sum(param.numel() for param in model.parameters())
    if numel > LARGEST:
        raise ModelError(f"its config has other names for its sizes: {numel} parameters")
    cpu = torch.device("cpu")
    place_holders(model, torch.float32, cpu)

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value

    Initializer(model, 0, torch.float32, cpu).run(take)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def unwritten(family: str) -> list[str]:
    """Names of what holds NaN, where fresh memory does."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return [name for name, value in start(family).items() if value.isnan().any()]
    finally:
        torch.use_deterministic_algorithms(deterministic)


def main(names: list[str]) -> int:
    """Print a line a family; 1 where one starts from unwritten memory."""
    counts = {"written": 0, "refused": 0, "unwritten": 0}
    for family in names or families():
        said = ""
        try:
            found = unwritten(family)
            kind = "unwritten" if found else "written"
            said = ", ".join(found[:4])
        except ModelError as refused:
            kind = "refused"
            said = str(refused)[:160]
        except Exception as failure:  # the library's, of a config that it cannot fill in
            kind = "refused"
            said = f"{type(failure).__name__}: {str(failure)[:140]}"
        counts[kind] += 1
        print(f"{family:28} {kind:10} {said}".rstrip(), flush=True)
    print(counts)
    return 1 if counts["unwritten"] else 0


if __name__ == "__main__":
    hf.library().logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
