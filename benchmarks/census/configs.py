"""A tiny config of every family, derived from its config class: nothing is downloaded.

Sizes are known by the names that configs give them, in nested configs too. A family whose config
refuses a size is tried without the sizes that are the least usual. What still fails is repaired
by hints (`hints.py`), as long as they lead to another failure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.census import hints
from plait.errors import ModelError
from plait.models import hf

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
VOCABULARY = 64
LENGTH = 8
LARGEST = 4_000_000


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


WIDTH, INNER, HEADS, GROUPS, HEAD = 32, 48, 4, 2, 8
SIZES: dict[str, Any] = {
    **_all("hidden_size n_embd d_model dim embedding_size emb_dim attention_hidden_size", WIDTH),
    **_all("word_embed_proj_dim decoder_hidden_size lru_width embed_dim", WIDTH),
    **_all("intermediate_size ffn_dim ffn_hidden_size n_inner moe_intermediate_size", INNER),
    **_all("shared_expert_intermediate_size encoder_ffn_dim decoder_ffn_dim dff d_inner", INNER),
    **_all("d_ff intermediate_size_mlp moe_shared_expert_intermediate_size ff_dim", INNER),
    **_all("dense_intermediate_size expert_ffn_hidden_size mlp_dim feed_forward_size", INNER),
    **_all("prefix_dense_intermediate_size shared_intermediate_size block_ff_dim", INNER),
    **_all("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers", 2),
    **_all("num_decoder_layers num_encoder_layers num_blocks num_hidden_layers_encoder", 2),
    **_all("num_attention_heads n_head n_heads num_heads attention_heads", HEADS),
    **_all("encoder_attention_heads decoder_attention_heads num_encoder_attention_heads", HEADS),
    **_all("num_decoder_attention_heads linear_num_value_heads linear_num_heads", HEADS),
    **_all("num_key_value_heads linear_num_key_heads num_kv_heads", GROUPS),
    **_all("head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size", HEAD),
    **_all("linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head", HEAD),
    **_all("linear_head_dim", HEAD),
    **_all("qk_head_dim index_head_dim global_head_dim attn_head_dim", HEAD),
    **_all("q_lora_rank kv_lora_rank", 16),
    **_all("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **_all("num_experts_per_tok moe_topk moe_k n_group topk_group", 2),
    **_all("max_position_embeddings n_positions max_seq_len max_sequence_length", 64),
    **_all("state_size mamba_d_state ssm_state_size mamba_state_dim", 8),
    **_all("vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size", VOCABULARY),
    **_all("vocab_size_per_layer_input entity_vocab_size shape_vocab_size", VOCABULARY),
    **_all("pronunciation_vocab_size encoder_hash_byte_group_vocab", VOCABULARY),
    **_all("entity_emb_size pronunciation_embed_dim shape_embed_dim d_latents", WIDTH),
    **_all("downsample_hidden_size output_dim hidden_size_global audio_hidden_size", WIDTH),
    **_all("cross_attention_hidden_size hidden_dim", WIDTH),
    **_all("hidden_size_per_layer_input rotary_dim num_latents dim_head", HEAD),
    **_all("first_k_dense_replace num_dense_layers", 1),
    **_all("bos_token_id eos_token_id pad_token_id decoder_start_token_id", 0),
    **_all("sep_token_id cls_token_id mask_token_id image_token_id video_token_id", 0),
    "image_size": 32,
    "window_size": 4,
    "num_channels": 3,
    "type_vocab_size": 2,
    "sliding_window": 4,
    "attention_window": 4,
    "chunk_size": LENGTH,
    "mamba_chunk_size": LENGTH,
    "tie_word_embeddings": False,
}
LISTS = {"depths": 1, "hidden_sizes": 16, "embed_dims": 16, "num_blocks": 1, "layers": 1}
LISTS |= {"embed_dim": 16, "base_attn_unit_dims": 16, "n_attn_blocks": 1, "depth": 1}
GROUPS_OF_STAGES = ("num_heads", "num_attention_heads")
"""Lists of heads by stage: two in each."""
DROPS = (
    "dropout",
    "pdrop",
    "dropout_rate",
    "dropout_prob",
    "layerdrop",
    "drop_path_rate",
    "jitter_noise",
)
UNSURE = (
    ("head_dim",),
    ("tie_word_embeddings",),
    ("n_inner", "intermediate_size"),
    ("pad_token_id",),
    ("head_dim", "num_key_value_heads"),
    ("image_size",),
    ("hidden_sizes", "embed_dims", "depths"),
    ("layer_types",),
    ("sliding_window", "attention_window"),
    ("num_attention_heads", "num_heads", "num_key_value_heads"),
)

MORE: tuple[dict[str, Any], ...] = (
    {"head_dim": HEAD},
    {"head_dim": 2 * HEAD},
    {"num_key_value_heads": HEADS},
    {"head_dim": HEAD, "num_key_value_heads": HEADS},
    {"num_experts_per_tok": 1},
    {"mamba_n_heads": 2 * WIDTH // HEAD},
    {"vocab_size": VOCABULARY},
    {"layer_types": ["full_attention"] * 2},
)
"""Keys that some config classes leave empty, or couple to others."""


def classes() -> list[tuple[str, str]]:
    """(task, model type) of every class that the library registers, each class once."""
    auto: Any = hf.library().models.auto.modeling_auto
    families: dict[str, list[tuple[str, str]]] = {}
    for task, mapping in TASKS.items():
        for family, name in sorted(getattr(auto, mapping).items()):
            families.setdefault(str(name), []).append((task, family))
    return sorted(_namesake(name, users) for name, users in families.items())


def _namesake(name: str, users: list[tuple[str, str]]) -> tuple[str, str]:
    """The family that the class is named after, among those that use it."""

    def shared(user: tuple[str, str]) -> int:
        plain = user[1].replace("-", "").replace("_", "")
        return len(plain) if name.lower().startswith(plain) else 0

    return max(users, key=shared)


def candidates(known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tables to try for a config with these defaults, the most complete first."""
    table = {"model_type": known["model_type"], **_small(known)}
    yield table
    for left_out in UNSURE:
        if any(key in table for key in left_out):
            yield {key: value for key, value in table.items() if key not in left_out}
    for more in MORE:
        if all(key in known for key in more):
            yield {**table, **more}
    yield {
        key: value
        for key, value in table.items()
        if not any(key in group for group in UNSURE) or key == "tie_word_embeddings"
    }


def defaults(family: str) -> dict[str, Any]:
    """The config of a family as its class makes it, with nested configs that it accepts."""
    config_class: Any = hf.library().models.auto.configuration_auto.CONFIG_MAPPING[family]
    try:
        known = config_class()
    except Exception:  # its default nested config is none that it accepts
        known = config_class(**hints.NESTED)
    table: dict[str, Any] = known.to_dict()
    return {**table, "model_type": family}


def _small(known: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config whose sizes are known, made small; nested configs too."""
    table: dict[str, Any] = {}
    for key, value in known.items():
        if isinstance(value, Mapping) and (key.endswith("config") or "model_type" in value):
            if not value:
                continue
            table[key] = {**_kept(value), **_small(value)}
            if key == "decoder" and "add_cross_attention" in value:  # else its encoder is unused
                table[key] |= {"is_decoder": True, "add_cross_attention": True}
        elif key.endswith(DROPS) and isinstance(value, float):
            table[key] = 0.0
        elif key.endswith(DROPS) and isinstance(value, list):  # one for each stage
            table[key] = [0.0] * len(value)
        elif key in LISTS and isinstance(value, list):
            step = 0 if LISTS[key] == 1 else LISTS[key]
            table[key] = [LISTS[key] + step * index for index in range(len(value))]
        elif key in GROUPS_OF_STAGES and isinstance(value, list):
            table[key] = [GROUPS] * len(value)
        elif key in SIZES and value is not None and not isinstance(value, (list, dict)):
            table[key] = SIZES[key]
        elif key == "image_size" and isinstance(value, list):
            table[key] = [SIZES[key]] * len(value)
    types = known.get("layer_types")
    if isinstance(types, list) and types and isinstance(types[0], str):
        kinds = list(dict.fromkeys(types))
        table["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        table["num_hidden_layers"] = len(table["layer_types"])
    return table


def _kept(known: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": known["model_type"]} if "model_type" in known else {}


Attempt = Callable[[str, Mapping[str, Any]], None]


def tiny(task: str, family: str) -> dict[str, Any]:
    """The first table from which the class can be made and run once on the host.

    Raises `ModelError` where none does.
    """
    return _first(task, family, _run)


def makeable(task: str, family: str) -> dict[str, Any]:
    """The first table that runs, or else the first from which the class can be made at all."""
    try:
        return tiny(task, family)
    except ModelError:
        return _first(task, family, _make)


def _first(task: str, family: str, attempt: Attempt) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = defaults(family)
        tables = list(candidates(known))
        failures = []
        for table in tables:
            if not (failure := _failure(attempt, task, table)):
                return table
            failures.append(failure)
        repaired = _repaired(tables[0], hints.of(task, known), lambda t: _failure(attempt, task, t))
    if repaired is None:
        raise ModelError(f"no tiny config runs: {failures[0]}")
    return repaired


def _repaired(
    table: dict[str, Any], known_hints: list[hints.Hint], failure_of: Callable[[Any], str]
) -> dict[str, Any] | None:
    """The table with hints, each kept that led to a failure not seen before; None where some
    failure stays.
    """
    seen = {failure_of(table)}
    left = list(known_hints)
    kept = True
    while kept:
        kept = False
        for hint in left:
            changed = hint(table)
            if changed == table:
                continue
            failure = failure_of(changed)
            if not failure:
                return changed
            if failure not in seen:
                seen.add(failure)
                table = changed
                left.remove(hint)
                kept = True
                break
    return None


def _failure(attempt: Attempt, task: str, table: Mapping[str, Any]) -> str:
    """Why an attempt failed; empty where it did not."""
    try:
        attempt(task, table)
    except Exception as failure:  # a family fails in its own way
        return f"{type(failure).__name__}: {failure}"
    return ""


def _make(task: str, table: Mapping[str, Any]) -> hf.HuggingFace:
    model = hf.make(table, task=task)
    numel = sum(param.numel() for param in model.parameters())
    if numel > LARGEST:
        raise ModelError(f"its config has other names for its sizes: {numel} parameters")
    return model


def _run(task: str, table: Mapping[str, Any]) -> None:
    model = _make(task, table)
    assert model.make_start is not None
    whole = model.make_start().double()
    logits = whole(example(task, table))
    wanted = (2,) if task == "image" else (2, LENGTH)
    if tuple(logits.shape[:-1]) != wanted or not logits.requires_grad:
        raise ModelError(f"its output is {list(logits.shape)}, no logits of {list(wanted)}")


def example(task: str, table: Mapping[str, Any]) -> torch.Tensor:
    """Inputs of two samples."""
    generator = torch.Generator().manual_seed(0)
    if task == "image":
        side = table.get("image_size", 32)
        sides = side if isinstance(side, list) else [side, side]
        shape = (2, table.get("num_channels", 3), *sides)
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
