"""The key that was meant by one that no section has.

A wrong key is mostly a part of a longer one (`hiden` of `hidden_size`), or a word of another
library (`n_epochs`). Letters alone lead astray: `hiden` is nearer to `hidden_act`,
which is shorter.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Final

MICRO_BATCHES: Final = "the plan says it: [plan] text = 'dp1 mb4'"
PRECISION: Final = "the plan says it: [plan] text = 'dp1 precision:bf16'"
GLOBAL_BATCH: Final = "did you mean 'global_batch' (samples a step, over all ranks)?"
CLUSTER_NAME: Final = "the name says how many: [cluster] name = 'h100x64'"

ELSEWHERE: Final = {
    "precision": PRECISION,
    "dtype": PRECISION,
    "micro_batches": MICRO_BATCHES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "remat": "the plan says it: [plan] text = 'dp1 remat:full'",
    "compile": "the plan says it: [plan] text = 'dp1 compile'",
    "batch_size": GLOBAL_BATCH,
    "learning_rate": "did you mean 'lr'?",
}
"""Keys that people look for in `[train]`, and where they are."""

SECTIONS_OF_OTHERS: Final = {
    **dict.fromkeys(("checkpoint", "checkpointing"), "did you mean 'train.checkpoint_every'?"),
    **dict.fromkeys(("parallel", "parallelism"), "the plan says it: [plan] text = 'dp2 tp2'"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "did you mean 'train.schedule'?"),
}
"""Sections of other libraries, and which key says the same."""

LAYERS: Final = "num_hidden_layers"
HEADS: Final = "num_attention_heads"
BATCH: Final = "train.global_batch"
LENGTH: Final = "data.seq_len"
SYNONYMS: Final[Mapping[str, Mapping[str, str]]] = {
    "model": {
        **dict.fromkeys(("layer", "layers", "num_layers", "n_layers", "num_layer"), LAYERS),
        **dict.fromkeys(("head", "heads", "num_heads", "n_heads", "head_num"), HEADS),
        **dict.fromkeys(("kv_head", "kv_heads", "n_kv_heads"), "num_key_value_heads"),
        **dict.fromkeys(("d_model", "dim", "embed_dim", "embd", "n_embed"), "hidden_size"),
        **dict.fromkeys(("ffn", "ffn_dim", "d_ff", "ffn_hidden_size"), "intermediate_size"),
        **dict.fromkeys(("num_experts", "experts"), "num_local_experts"),
        **dict.fromkeys(("top_k", "moe_top_k"), "num_experts_per_tok"),
        **dict.fromkeys(("max_pos", "block_size", "context_length"), "max_position_embeddings"),
        **dict.fromkeys(("seqlen", "seq_length", "sequence_length"), LENGTH),
        **dict.fromkeys(("batch", "batch_size"), BATCH),
        **dict.fromkeys(("drop", "drop_rate"), "dropout"),
        "learning_rate": "train.lr",
    },
    "data": {
        **dict.fromkeys(("block_size", "context_length", "max_length"), "seq_len"),
        **dict.fromkeys(("batch", "batch_size"), BATCH),
    },
    "train": {
        **dict.fromkeys(("clip", "grad_clip", "max_grad_norm"), "clip_grad_norm"),
        **dict.fromkeys(("gradient_clipping", "clip_grad"), "clip_grad_norm"),
        **dict.fromkeys(("epochs", "num_epochs", "iters", "max_iters"), "steps"),
        **dict.fromkeys(("save_every", "save_steps", "save_interval"), "checkpoint_every"),
        **dict.fromkeys(("scheduler", "lr_scheduler_type"), "schedule"),
        **dict.fromkeys(("seqlen", "seq_length", "sequence_length"), LENGTH),
        **dict.fromkeys(("eval_every", "eval_steps", "eval_interval"), "eval.every"),
        "wd": "weight_decay",
    },
    "eval": dict.fromkeys(("steps", "interval"), "every"),
    "cluster": dict.fromkeys(("gpus", "num_gpus", "devices", "nodes", "num_nodes"), CLUSTER_NAME),
    "plan": dict.fromkeys(("plan", "parallel", "strategy", "name"), "text"),
}
"""Words of other libraries and of everyday speech, by section: the key here, or the one of another
section.
"""
WHOLE: Final = 0.9
"""The likeness from which a key is the one that was meant, whatever other keys contain."""
CONTAINED: Final = 0.8
"""The likeness from which a key counts as a part of a longer one."""
NEAR: Final = 0.6
"""The likeness from which a key is worth naming."""


def nearest_key(section: str, key: str, known: Iterable[str]) -> str:
    """The clause that names the key that was meant, or all known ones when none is near. Of keys
    that are equally near the first is named.

    >>> nearest_key("model", "hiden", ["num_hidden_layers", "hidden_size", "hidden_act"])
    "did you mean 'hidden_size'?"
    """
    own = list(known)
    found = _synonym(section, key, own)
    if found is not None:
        return found
    elsewhere = ELSEWHERE if section == "train" else {}
    near = likest(key, [*own, *elsewhere])
    if near is None:
        return f"known: {', '.join(sorted(own))}"
    return elsewhere.get(near, f"did you mean '{near}'?")


def likest(word: str, names: Iterable[str]) -> str | None:
    """The name that is nearest to a word, whole or with one of its parts; None where none is."""
    best, best_rank = None, (NEAR, 0)
    for name in names:
        rank = likeness(word, name), _num_shared(word, name)
        if rank > best_rank:
            best, best_rank = name, rank
    return best


def likeness(word: str, name: str) -> float:
    """How like a word is to a name, or to parts of it that follow each other: 0 to 1.

    A name that is nearly the word itself has more, up to 2.
    """
    parts = name.split("_")
    letters = _letters(word)
    whole = _ratio(letters, "".join(parts))
    if whole >= WHOLE:
        return 1.0 + whole
    runs = (
        "".join(parts[start:stop])
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    )
    part = max(_ratio(letters, run) for run in runs)
    return part if part >= CONTAINED else whole


def _synonym(section: str, key: str, own: Collection[str]) -> str | None:
    """The clause for a word of another library, where its key is one that can be given."""
    meant = _BY_LETTERS.get((section, _letters(key)))
    if meant is None or meant.endswith(f".{key}"):  # the same word in another section
        return None
    if "." not in meant and " " not in meant and meant not in own:
        return None
    return meant if " " in meant else f"did you mean '{meant}'?"


def _letters(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _num_shared(left: str, right: str) -> int:
    """The letters with which both begin."""
    pairs = zip(left, right, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


_BY_LETTERS: Final = {
    (section, _letters(word)): meant
    for section, words in SYNONYMS.items()
    for word, meant in words.items()
}
