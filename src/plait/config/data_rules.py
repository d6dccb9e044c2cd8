"""Rules of `[data]`, of its mixture and of `[eval] data`, alone and with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

from plait.config.model import (
    LANGUAGE_MODELS,
    FNOConfig,
    GPTConfig,
    HuggingFaceConfig,
    LlamaConfig,
    MLPConfig,
    ModelSection,
    Python,
    ResNetConfig,
)
from plait.config.read import longest_sequence
from plait.config.sections import Data, DataSource, Sections
from plait.values import JsonValue

BYTES: Final = 256
DIGIT_FEATURES = 64
DIGIT_CLASSES = 10
TOKENS: Final = ("files", "hf")
"""Data of tokens, which a tokenizer makes of texts."""
OF_TOKENS: Final = ("column", "end_token", "samples", "skip_bad", "cache")
"""Keys of data of tokens alone."""
OWNERS: Final = {
    "files": ("text", "files"),
    "path": ("hf",),
    **dict.fromkeys(("split", "streaming", "subset", "rows"), ("hf",)),
    "document": ("files",),
    **dict.fromkeys(OF_TOKENS, TOKENS),
}
"""Keys that belong to data of certain names."""
KNOWN: Final = "stdlib, text, digits, random, files, hf"

Rule: TypeAlias = Callable[[DataSource, ModelSection], Iterator[str]]


def has_one_source(data: DataSource, model: ModelSection) -> Iterator[str]:
    """A name or a function."""
    if getattr(data, "mixture", None) is not None:
        named = "name" if data.name is not None else "python"
        if data.name is not None or data.python is not None:
            yield f"data.{named} and data.mixture are two sources; keep one"
        return
    if data.name is None and data.python is None:
        yield f"data.name is missing; known: {KNOWN} (or python = 'module:function')"
    if data.name not in (None, "hf") and data.python is not None:
        yield f"data.name '{data.name}' and data.python '{data.python}' are two sources; keep one"


def names_its_files(data: DataSource, model: ModelSection) -> Iterator[str]:
    """Files where there is something to read, and no keys of other data."""
    if data.name in ("text", "files") and not data.files:
        yield f"data.files is missing; data '{data.name}' needs files = ['path', ...]"
    if data.name == "hf":
        yield from _names_its_set(data)
    for key, owners in OWNERS.items():
        is_set = getattr(data, key) != type(data).model_fields[key].default
        if is_set and data.name is not None and data.name not in owners:
            names = " and ".join(f"'{owner}'" for owner in owners)
            yield f"data.{key} belongs to data {names}, not to '{data.name}'"
    if data.tokenizer not in (None, "bytes") and data.name not in (None, *TOKENS):
        yield (
            f"data.tokenizer {data.tokenizer!r} belongs to data 'files' and 'hf'; data "
            f"'{data.name}' knows bytes alone"
        )
    if getattr(data, "from_step", None) and getattr(data, "mixture", None) is None:
        yield "data.from_step belongs to a mixture; its sources are tables [[data.mixture]]"
    if data.packed and data.name in TOKENS:
        yield f"data.packed belongs to data 'stdlib' and 'text', not to '{data.name}'"


def _names_its_set(data: DataSource) -> Iterator[str]:
    """One set of the library: saved, streamed, or of a function."""
    if not data.path and data.python is None:
        yield (
            "data.path is missing; data 'hf' needs path = 'folder' of save_to_disk, or python = "
            "'module:function' that returns a set"
        )
    if data.path and data.python is not None:
        yield f"data.path {data.path!r} and data.python '{data.python}' are two sources; keep one"
    if data.streaming and not data.path:
        yield "data.streaming reads data.path; leave it out, and return a stream from data.python"
    if data.subset is not None and not data.streaming:
        yield "data.subset belongs to data.streaming; leave it out, or say streaming = true"


def text_needs_a_language_model(data: DataSource, model: ModelSection) -> Iterator[str]:
    """Bytes are tokens: 256 of them, in sequences."""
    if data.name not in ("stdlib", "text", *TOKENS):
        return
    if isinstance(model, (MLPConfig, ResNetConfig, FNOConfig)):
        yield (
            f"data '{data.name}' is text, and model '{model.name}' takes none; use a model of "
            f"{', '.join(LANGUAGE_MODELS)}"
        )
    if data.name in TOKENS and data.tokenizer != "bytes":
        return
    vocab_size: JsonValue = getattr(model, "vocab_size", None)
    if isinstance(model, HuggingFaceConfig):
        vocab_size = written_vocabulary(model.config)
    if isinstance(vocab_size, int) and vocab_size < BYTES:
        yield (
            f"model.vocab_size {vocab_size} is too small: data '{data.name}' is bytes and needs "
            f"vocab_size {BYTES} or more"
        )
    elif isinstance(model, HuggingFaceConfig) and vocab_size is not None and data.tokenizer is None:
        yield from foreign_alphabet(vocab_size, data.name)


def foreign_alphabet(vocab_size: int, name: str) -> Iterator[str]:
    """A Hugging Face config comes with the vocabulary of its tokenizer, whose numbers are no
    bytes.
    """
    if vocab_size != BYTES:
        yield (
            f"model.config has vocab_size {vocab_size}, and data '{name}' is the {BYTES} bytes of "
            "raw text, which are not "
            f"the tokens of that vocabulary; set vocab_size = {BYTES} in model.config, give tokens "
            "by data.python, or say "
            "data.tokenizer = 'bytes' to train on bytes all the same"
        )


def written_vocabulary(config: JsonValue) -> int | None:
    """The `vocab_size` that a Hugging Face config says, a table or a file; None where it says
    none.
    """
    table = config
    if not isinstance(config, dict):
        path = Path(config)
        try:
            file = path / "config.json" if path.is_dir() else path
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # said where the model is made
            return None
    inner = table.get("text_config") if isinstance(table, dict) else None
    for part in (table, inner):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None


def packing_packs_documents(data: DataSource, model: ModelSection) -> Iterator[str]:
    """Documents of tokens, for a model whose tokens compete for nothing."""
    if not data.packing:
        return
    if data.packed or data.samples is not None:
        yield "data.packing makes samples of documents itself; leave data.packed and samples out"
    if data.name in ("random", "digits"):
        yield f"data.packing needs documents, and data '{data.name}' has none"
    if getattr(model, "task", None) not in (None, "causal"):
        yield "data.packing is for models that guess the next token; leave it out"
    if getattr(model, "capacity_factor", None) or model_chooses(model):
        yield (
            "data.packing would let documents see each other: with model.capacity_factor or "
            "topk_method 'expert_choice' the tokens of a sequence compete for experts"
        )


def model_chooses(model: ModelSection) -> bool:
    """Whether experts choose their tokens."""
    return getattr(model, "topk_method", None) == "expert_choice"


def digits_need_an_image_model(data: DataSource, model: ModelSection) -> Iterator[str]:
    """8 x 8 grey images of ten digits."""
    if data.name != "digits":
        return
    if isinstance(model, (GPTConfig, LlamaConfig, HuggingFaceConfig, FNOConfig)):
        yield f"data 'digits' is images, and model '{model.name}' takes none; use mlp or resnet"
    if isinstance(model, MLPConfig) and model.in_features != DIGIT_FEATURES:
        yield (
            f"model.in_features {model.in_features}: data 'digits' needs in_features "
            f"{DIGIT_FEATURES}"
        )
    if isinstance(model, MLPConfig) and model.out_features < DIGIT_CLASSES:
        yield (
            f"model.out_features {model.out_features}: data 'digits' needs out_features "
            f"{DIGIT_CLASSES} or more"
        )
    if isinstance(model, ResNetConfig) and model.in_channels != 1:
        yield f"model.in_channels {model.in_channels}: data 'digits' needs in_channels 1"
    if isinstance(model, ResNetConfig) and model.num_classes < DIGIT_CLASSES:
        yield (
            f"model.num_classes {model.num_classes}: data 'digits' needs num_classes "
            f"{DIGIT_CLASSES} or more"
        )


def random_data_needs_known_shapes(data: DataSource, model: ModelSection) -> Iterator[str]:
    """A user's own model does not say what it takes."""
    if data.name == "random" and isinstance(model, Python):
        yield (
            "data.name 'random' needs a model by name, whose shapes it knows; give data.python = "
            "'module:function'"
        )


def sequences_fit_the_positions(data: DataSource, model: ModelSection) -> Iterator[str]:
    """A sequence may not be longer than the positions that the model has."""
    longest = longest_sequence(model)
    if data.seq_len is not None and longest is not None and data.seq_len > longest:
        yield (
            f"data.seq_len {data.seq_len} is longer than model.max_position_embeddings "
            f"{longest}; "
            "shorten the one or raise the other"
        )


RULES: Final[tuple[Rule, ...]] = (
    has_one_source,
    names_its_files,
    text_needs_a_language_model,
    packing_packs_documents,
    digits_need_an_image_model,
    random_data_needs_known_shapes,
    sequences_fit_the_positions,
)


def data_is_right(config: Sections) -> Iterator[str]:
    """All rules for the data of training and of evaluation, with the path of each key."""
    sources: list[tuple[str, DataSource]] = [("data", config.data)]
    if config.eval.data is not None:
        sources.append(("eval.data", config.eval.data))
    for path, source in sources:
        if isinstance(source, Data) and source.mixture is not None:
            yield from _mixture_is_right(path, source)
            sources += [(f"{path}.mixture[{n}]", part) for n, part in enumerate(source.mixture)]
        for rule in RULES:
            for sentence in rule(source, config.model):
                yield _under(path, sentence)


def _under(path: str, sentence: str) -> str:
    """A sentence about data, with the path of its key, or of the section where it names no key."""
    key = "data." if "data." in sentence else "data '"
    return sentence.replace(key, path + key.removeprefix("data"), 1)


def _mixture_is_right(path: str, data: Data) -> Iterator[str]:
    """Weights for every phase, samples of one length, and something to draw at any time."""
    parts = data.mixture or ()
    if not parts:
        yield f"{path}.mixture has no source"
        return
    steps = data.from_step or (0,)
    if steps[0] != 0 or any(one >= other for one, other in pairwise(steps)):
        yield f"{path}.from_step {list(steps)} must begin with 0 and rise"
    for number, part in enumerate(parts):
        name = f"{path}.mixture[{number}]"
        if len(part.weight) != len(steps):
            yield (
                f"{name}.weight has {len(part.weight)} numbers, and {path}.from_step names "
                f"{len(steps)} phases"
            )
        elif not any(part.weight):
            yield f"{name}.weight is 0, so nothing is drawn from it; leave the source out"
        if part.seq_len is not None and part.seq_len != data.seq_len:
            yield f"{name}.seq_len {part.seq_len} differs from {path}.seq_len {data.seq_len}"
    for number, step in enumerate(steps):
        if not any(part.weight[number] for part in parts if len(part.weight) > number):
            yield f"{path}.mixture: all weights from step {step} on are 0"
