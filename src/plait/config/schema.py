"""The reference of a config: every key with its type, default and meaning, and a JSON schema.

Both are read from the sections, so that no key is described twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from pydantic.json_schema import models_json_schema

from plait.config.model import MODELS, Python, Section
from plait.config.sections import SCHEMAS
from plait.values import JsonObject, JsonValue

MODEL_SCHEMAS: Final[dict[str, type[Section]]] = {**MODELS, "python": Python}
"""The schema of `[model]` by its name; `python` is a user's own function."""
HUGE: Final = 1e15
"""Bounds from here on only keep numbers finite; the type of a key does not name them."""
DERIVED: Final = ("intermediate_size",)
"""Keys without a default that are computed from other keys where they are missing."""


@dataclass(frozen=True)
class Key:
    """One key of a config. `model` names the family, for keys of `[model]`."""

    section: str
    key: str
    type: str
    default: JsonValue
    required: bool
    meaning: str
    model: str = ""

    def as_dict(self) -> dict[str, object]:
        """The key as plain data."""
        return asdict(self)


def keys() -> list[Key]:
    """Every key of every section, those of `[model]` by family."""
    listed: list[Key] = []
    for name, schema in MODEL_SCHEMAS.items():
        listed += _keys_of("model", schema, name)
    for section, schema in SCHEMAS.items():
        listed += _keys_of(section, schema)
    return listed


def _keys_of(section: str, schema: type[Section], model: str = "") -> Iterator[Key]:
    described = schema.model_json_schema()
    required = set(described.get("required", ())) - set(DERIVED)
    for key, about in described["properties"].items():
        yield Key(
            section=section,
            key=key,
            type=type_text(about),
            default=about.get("default"),
            required=key in required,
            meaning=about.get("description", "").replace("\n", " "),
            model=model,
        )


def type_text(about: JsonObject) -> str:
    """The type of a JSON schema in words: `integer >= 1`, `adamw | sgd`, `list of string`.

    >>> type_text({"type": "integer", "minimum": 1})
    'integer >= 1'
    """
    if "$ref" in about:
        return "table"
    if "anyOf" in about:
        choices = [type_text(choice) for choice in about["anyOf"] if choice.get("type") != "null"]
        return " | ".join(choices)
    words = about.get("enum") or [about[key] for key in ("const",) if key in about]
    if words:
        return " | ".join(str(word) for word in words)
    if about.get("type") == "array":
        return _list_text(about)
    if about.get("pattern"):
        return "module:function"
    name = "table" if about.get("type") == "object" else about.get("type", "any")
    return f"{name}{_range_text(about)}"


def _list_text(about: JsonObject) -> str:
    if "prefixItems" in about:
        return "[" + ", ".join(type_text(item) for item in about["prefixItems"]) + "]"
    return f"list of {type_text(about['items'])}"


def _range_text(about: JsonObject) -> str:
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    return "".join(
        f" {sign} {about[key]:g}"
        for key, sign in signs.items()
        if key in about and abs(about[key]) < HUGE
    )


def json_schema() -> dict[str, object]:
    """The JSON schema of a config file, for editors that check TOML."""
    schemas = [*MODEL_SCHEMAS.values(), *SCHEMAS.values()]
    _, described = models_json_schema([(schema, "validation") for schema in schemas])
    definitions = {_short(name): about for name, about in described["$defs"].items()}
    for definition in definitions.values():
        definition["title"] = _short(definition["title"])
        missing = [key for key in definition.get("required", ()) if key not in DERIVED]
        if "required" in definition:
            definition["required"] = missing
    families = [_reference(schema) for schema in MODEL_SCHEMAS.values()]
    properties: dict[str, object] = {"model": {"anyOf": families}}
    for section, schema in SCHEMAS.items():
        properties[section] = _reference(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "plait config",
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _reference(schema: type[Section]) -> dict[str, str]:
    return {"$ref": f"#/$defs/{_short(schema.__name__)}"}


def _short(name: str) -> str:
    """The name of a section in the schema: `GPT` for `GPTConfig`."""
    return name.removesuffix("Config")
