"""Data that needs no download, and the loader that gives each rank its part of it.

A data set has a length and a pair (input, target) at each index. Those made here also have
`batch(indices)`, the pairs stacked, in a few tensor operations. `make` fits the data to the model:
what it predicts, its vocabulary, its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.datasets import files, user
from plait.datasets.digits import Digits
from plait.datasets.keys import SectionKeys, known_vocabulary
from plait.datasets.keys import key as key
from plait.datasets.loader import Loader as Loader
from plait.datasets.masked import Masked as Masked
from plait.datasets.mixture import SampleMixture
from plait.datasets.packing import Packing
from plait.datasets.packing import check as check_packing
from plait.datasets.random import RandomClasses, RandomFields, RandomTokens
from plait.datasets.sample_set import SampleSet
from plait.datasets.text import VOCAB_SIZE as VOCAB_SIZE
from plait.datasets.text import lines, stdlib, text
from plait.errors import DataError, nearest

LANGUAGE = ("gpt", "llama", "hf")
BYTE_DATA = ("stdlib", "text")
TOKEN_DATA = files.NAMES
DOCUMENTS = (*BYTE_DATA, *TOKEN_DATA)
"""Data that have documents."""
NAMES = ("stdlib", "text", "files", "hf", "digits", "random")
TAKE_DOCUMENTS = ("gpt", "llama")
"""Families whose forward takes the document of each token."""
INHERITED = ("seq_len", "tokenizer", "end_token", "samples", "cache", "skip_bad", "seed", "packing")
"""Keys of `[data]` that hold for each source of its mixture."""
SEQ_LEN = 128
IMAGE_SIZE = 32


def make(
    data: SectionKeys, model: SectionKeys = None, seed: int = 0, global_batch: int = 1
) -> SampleSet:
    """The data set of a `[data]` section, fitted to a `[model]` section.

    Each is a mapping or an object with attributes. `global_batch` turns steps, from which weights
    of a mixture hold, into samples. `data` has name or python, seq_len, files, seed
    (`seed` replaces a missing one). Random data also has num_samples and image_size. Raises
    `DataError` when data and model do not fit.
    """
    if key(data, "mixture") is not None:
        return _mixture(data, model, seed, global_batch)
    return _source(data, model, seed)


def _source(data: SectionKeys, model: SectionKeys, seed: int) -> SampleSet:
    """The data set of one source."""
    if key(data, "packing", False):
        check_packing(data, model, DOCUMENTS)
        return Packing(_documents(data, model), _seq_len(data, model))
    name = key(data, "name")
    if key(data, "python") is not None and name not in files.NAMES:
        return user.make(key(data, "python"))
    if name not in NAMES:
        raise DataError(
            f"there is no data {name!r}; {nearest(str(name), NAMES)}"
            if name
            else "[data] needs a name or python"
        )
    if name == "digits":
        return _digits(model)
    if name == "random":
        return _random(data, model, key(data, "seed", seed))
    seq_len = _seq_len(data, model)
    if name in files.NAMES:
        return files.load_sequences(data, model, seq_len)
    _check_bytes(name, model)
    packed = bool(key(data, "packed", False))
    if packed and key(model, "name") not in TAKE_DOCUMENTS:
        raise DataError(
            "packed data needs a model that takes documents: "
            f"{' or '.join(TAKE_DOCUMENTS)}, not {key(model, 'name')!r}"
        )
    return (
        stdlib(seq_len, packed=packed)
        if name == "stdlib"
        else text(key(data, "files", ()), seq_len, packed=packed)
    )


def _documents(data: SectionKeys, model: SectionKeys) -> SampleSet:
    """The documents that a `[data]` section names."""
    name = key(data, "name")
    if name in files.NAMES:
        return files.load_documents(data, model)[0]
    if key(data, "python") is not None:
        return user.documents(key(data, "python"))
    _check_bytes(name, model)
    return lines(None if name == "stdlib" else key(data, "files", ()))


def _check_bytes(name: str, model: SectionKeys) -> None:
    vocab_size = _vocab_size(model, VOCAB_SIZE)
    if vocab_size < VOCAB_SIZE:
        raise DataError(
            f"data {name!r} is made of bytes and needs vocab_size = {VOCAB_SIZE} or more, not "
            f"{vocab_size}"
        )


def _mixture(data: SectionKeys, model: SectionKeys, seed: int, global_batch: int) -> SampleMixture:
    """The sets of a mixture, with the weights of each phase."""
    inherited = {name: key(data, name) for name in INHERITED}
    sets = []
    weights = []
    for part in key(data, "mixture"):
        own = part if isinstance(part, Mapping) else part.as_dict()
        given = {name: value for name, value in own.items() if value not in (None, 0)}
        sets.append(_source({**inherited, **given}, model, seed))
        weight = key(part, "weight", 0)
        weights.append(weight if isinstance(weight, (list, tuple)) else [weight])
    starts = [step * global_batch for step in key(data, "from_step", (0,))]
    return SampleMixture(sets, list(zip(*weights, strict=True)), starts, seed)


def _seq_len(data: SectionKeys, model: SectionKeys) -> int:
    family = key(model, "name")
    if family in ("mlp", "resnet", "fno"):
        raise DataError(f"model {family!r} takes no text; use digits or random data")
    seq_len: int = key(data, "seq_len", SEQ_LEN)
    longest = key(model, "max_position_embeddings", 1024 if family == "gpt" else None)
    if seq_len < 1 or (longest is not None and seq_len > longest):
        raise DataError(f"seq_len = {seq_len} is not in 1 .. max_position_embeddings = {longest}")
    return seq_len


def _vocab_size(model: SectionKeys, default: int | None = None) -> int:
    size = known_vocabulary(model) or default
    if size is None:
        raise DataError(
            f"random data for model {key(model, 'name')!r} needs its vocab_size, and neither its "
            "config nor a text_config or decoder inside says one; set vocab_size there"
        )
    return int(size)


def _digits(model: SectionKeys) -> SampleSet:
    family = key(model, "name")
    if family in LANGUAGE:
        raise DataError(
            f"model {family!r} takes tokens, not images; use stdlib, text or random data"
        )
    wants = {
        "resnet": {"in_channels": 1, "num_classes": 10},
        "mlp": {"in_features": 64, "out_features": 10},
    }
    defaults = {"in_channels": 3, "num_classes": 1000}
    for name, number in wants.get(family, {}).items():
        given = key(model, name, defaults.get(name, number))
        if given < number or (given > number and name.startswith("in_")):
            raise DataError(f"the digits need {name} = {number} in [model], not {given}")
    return Digits(flat=family != "resnet")


def _random(data: SectionKeys, model: SectionKeys, seed: int) -> SampleSet:
    family = key(model, "name")
    size = {} if key(data, "num_samples") is None else {"num_samples": key(data, "num_samples")}
    if family == "mlp":
        return RandomClasses(
            (key(model, "in_features"),), key(model, "out_features"), seed=seed, **size
        )
    if family == "resnet":
        side = key(data, "image_size", IMAGE_SIZE)
        shape = (key(model, "in_channels", 3), side, side)
        return RandomClasses(shape, key(model, "num_classes", 1000), seed=seed, **size)
    if family == "fno":
        channels = (key(model, "in_channels", 1), key(model, "out_channels", 1))
        return RandomFields(channels, key(data, "image_size", IMAGE_SIZE), seed=seed, **size)
    if family == "hf" and key(model, "task") == "image":
        return _random_pictures(data, model, seed, size)
    if family in LANGUAGE:
        return RandomTokens(_seq_len(data, model), _vocab_size(model), seed=seed, **size)
    raise DataError(
        "random data needs a model by name, whose shapes it knows; a model by python needs data "
        "by python"
    )


def _random_pictures(
    data: SectionKeys, model: SectionKeys, seed: int, size: Mapping[str, int]
) -> SampleSet:
    """Pictures for a Hugging Face model of images: of its config's channels, classes and size."""
    config = key(model, "config")
    table = config if isinstance(config, Mapping) else {}
    side = key(data, "image_size", key(table, "image_size", IMAGE_SIZE))
    sides = (side, side) if isinstance(side, int) else tuple(side)
    shape = (key(table, "num_channels", 3), *sides)
    classes = key(table, "num_labels", len(key(table, "id2label", "ab")))
    return RandomClasses(shape, classes, seed=seed, **size)
