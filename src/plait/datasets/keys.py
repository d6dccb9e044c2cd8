"""Keys of a section of a config, which is a mapping or an object with attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from plait.values import JsonMapping, JsonValue

SectionKeys: TypeAlias = JsonMapping | object
"""A section of a config: a mapping, or an object with attributes."""


def key(section: SectionKeys, name: str, default: JsonValue = None) -> JsonValue:
    """The value of a key that is there and not None, else the default."""
    value = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return default if value is None else value


def known_vocabulary(model: SectionKeys) -> int | None:
    """The model's vocabulary, where its keys say one."""
    size: int | None = key(model, "vocab_size", _vocabulary_of(key(model, "config")))
    return size


def _vocabulary_of(config: SectionKeys) -> int | None:
    """The vocabulary of a Hugging Face table, or of the language model inside it, which may be the
    decoder.
    """
    if not isinstance(config, Mapping):
        return None
    parts = (_vocabulary_of(config.get(part)) for part in ("text_config", "decoder"))
    inner: int | None = key(config, "vocab_size", next((size for size in parts if size), None))
    return inner
