"""Changes to a tiny config that some class needs, each named after the keys that it is about.

None is tied to a family: a hint holds wherever a config, or one nested in it, has its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from plait.models import hf

Table = dict[str, Any]
Hint = Callable[[Table], Table]

NO_LAYER_INPUTS: Table = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
NESTED: Table = {"text_config": NO_LAYER_INPUTS}
"""What a config class accepts that refuses its own default of a nested config."""

WIDTH, HEADS, HEAD, VOCABULARY = 32, 4, 8, 64
DIVISOR = 8  # of the widths in lists

FILLED: Table = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "logit_scale": 1.0,
    "clip_qkv": 8.0,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "mask_token_id": 1,
    "num_buckets": 2,
}
"""Numbers of keys that config classes leave None."""

TOGETHER: tuple[Table, ...] = (
    {"qk_head_dim": 2 * HEAD, "num_key_value_heads": HEADS},
    {"num_expert_group": 2, "num_experts_per_token": 2, "topk_group": 1},
    {"n_group": 1, "topk_group": 1},
    {"num_key_value_heads": HEADS},
    {"num_heads": 2 * WIDTH // HEAD, "head_dim": HEAD},
    {"attention_types": [[["global", "local"], 1]]},
    {"axial_pos_embds": False},
    {"is_decoder": True},
    {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    {"num_kv_shared_layers": 0},
    NO_LAYER_INPUTS,
    {"backbone_hidden_size": WIDTH, "num_centroids": HEAD, "centroid_intermediate_top_k": 2},
    {"head_dim": 2 * HEAD, "qk_nope_head_dim": HEAD},
    {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
    {"mamba_headdim": 2 * WIDTH // HEADS, "n_mamba_heads": HEADS},
    {"hybrid_layer_ids": [1]},
    {"blank_token_id": 0},
    {"num_filters": 2},
    {"num_groups": 2},
    {"stem_out_channels": 16},
    {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    {"image_size": 64, "window_size": 2},
    {"image_size": 64},
    {"image_size": 128},
    {"masked_unit_size": [2, 2]},
    {"depth": [1, 2, 3]},
    {"ngram_vocab_size_base": VOCABULARY, "make_ngram_vocab_size_divisible_by": 8},
)
"""Values that belong together."""

TYPES = ("layer_types", "layers_block_type", "attn_layers", "mlp_layer_types")
"""Lists of a kind for each layer."""


def of(task: str, known: Mapping[str, Any]) -> list[Hint]:
    """The hints that change something in a config with these defaults."""
    computed = (_filled, _typed, _cut, _rope_by_type, _rope_theta, _spoken, _hoisted)
    hints: list[Hint] = [
        lambda table: {**table, "architectures": _architectures(task, str(known["model_type"]))}
    ]
    hints += [lambda table, change=change: _into(table, known, change) for change in computed]
    for values in TOGETHER:
        hints.append(lambda table, values=values: _into(table, known, _together(values)))
    lists = [lambda table, change=change: _into(table, known, change) for change in LISTS]
    return hints + lists


Change = Callable[[Mapping[str, Any], Table], Table]


def _into(table: Table, known: Mapping[str, Any], change: Change) -> Table:
    """The table and those nested in it, each with its change."""
    changed = {**table, **change(known, table)}
    for key, value in table.items():
        inner = known.get(key)
        if isinstance(value, dict) and isinstance(inner, Mapping) and key != "rope_parameters":
            changed[key] = _into(value, inner, change)
    return changed


def _together(values: Table) -> Change:
    def change(known: Mapping[str, Any], table: Table) -> Table:
        return dict(values) if all(key in known for key in values) else {}

    return change


def _filled(known: Mapping[str, Any], table: Table) -> Table:
    return {key: value for key, value in FILLED.items() if key in known and known[key] is None}


def _typed(known: Mapping[str, Any], table: Table) -> Table:
    """A layer of each kind; the number of layers follows."""
    found: Table = {}
    for key in TYPES:
        types = known.get(key)
        if isinstance(types, list) and types:
            kinds = list(dict.fromkeys(types))
            found[key] = kinds * 2 if len(kinds) == 1 else kinds
    lengths = {len(types) for types in found.values()}
    if found and "num_hidden_layers" in known:
        found["num_hidden_layers"] = max(lengths)
    return found


def _cut(known: Mapping[str, Any], table: Table) -> Table:
    """Lists of a number for each layer, for the layers that are left."""
    layers = known.get("num_hidden_layers")
    return {
        key: [_least(one) for one in value[: table.get("num_hidden_layers", 2)]]
        for key, value in known.items()
        if isinstance(value, list) and len(value) == layers and key not in TYPES
    }


def _least(value: Any) -> Any:
    return min(value, WIDTH) if isinstance(value, int) else value


def _scaled(known: Mapping[str, Any], table: Table) -> Table:
    """Lists of widths, and of lists of them, divided by one number."""
    return {
        key: _divided(value)
        for key, value in known.items()
        if isinstance(value, list) and _divided(value) != value
    }


def _divided(value: Any) -> Any:
    if isinstance(value, list):
        return [_divided(one) for one in value]
    if isinstance(value, int) and value >= 2 * DIVISOR and value % DIVISOR == 0:
        return value // DIVISOR
    return value


def _unshrunk(known: Mapping[str, Any], table: Table) -> Table:
    """The config's own lists."""
    return {key: known[key] for key, value in table.items() if isinstance(value, list)}


LISTS = (_scaled, _unshrunk)
"""Of stages of pictures; tried last, since they undo what is small."""


def _rope_by_type(known: Mapping[str, Any], table: Table) -> Table:
    """Rotary embeddings of each kind of layer, where there are none."""
    if known.get("rope_parameters") != {} or not known.get("layer_types"):
        return {}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {kind: dict(rope) for kind in known["layer_types"]}}


def _rope_theta(known: Mapping[str, Any], table: Table) -> Table:
    """The base of rotary embeddings beside the clip of their queries, as files have it."""
    return {"rope_theta": 10000.0} if "clip_qkv" in known else {}


def _spoken(known: Mapping[str, Any], table: Table) -> Table:
    """The first language as the default."""
    languages = known.get("languages")
    return {"default_language": languages[0]} if languages else {}


def _hoisted(known: Mapping[str, Any], table: Table) -> Table:
    """The keys of a decoder's config, where its class is registered under the whole's."""
    decoder = known.get("decoder")
    if not isinstance(decoder, Mapping):
        return {}
    missing = {key: value for key, value in decoder.items() if key not in known}
    return {key: table.get("decoder", {}).get(key, value) for key, value in missing.items()}


def _architectures(task: str, family: str) -> list[str]:
    return list(_classes(task, family))


def _classes(task: str, family: str) -> Iterator[str]:
    from benchmarks.census.configs import TASKS

    auto: Any = hf.library().models.auto.modeling_auto
    names = getattr(auto, TASKS[task]).get(family)
    yield names if isinstance(names, str) else names[0]
