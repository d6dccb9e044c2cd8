"""From tables to sections: every fault of every section becomes one sentence with the key's path
and the cure.

The schemas say what is right; here is only how it is said. pydantic's own messages speak of its
types, which no user of a TOML file has heard of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from plait.config import huggingface
from plait.config.model import (
    LANGUAGE_MODELS,
    MODELS,
    HuggingFaceConfig,
    ModelSection,
    Python,
    TransformerConfig,
)
from plait.config.sections import SCHEMAS, Data, Eval, MixturePart, ParameterGroup, Train
from plait.config.suggestions import ELSEWHERE, SECTIONS_OF_OTHERS, nearest_key
from plait.errors import nearest
from plait.values import JsonMapping, JsonObject, JsonValue

AnySection = TypeVar("AnySection", bound=BaseModel)

SECTIONS: Final = ("model", *SCHEMAS)
SEQ_LEN: Final = 128


def read_model(table: Mapping[str, object], faults: list[str]) -> ModelSection | None:
    """The section of a `[model]` table; adds its faults and returns None when it has any."""
    keys: JsonObject = dict(table)
    if "python" in keys and "name" not in keys:
        return read_section("model", Python, keys, faults)
    name = keys.get("name")
    if "python" in keys:
        faults.append(
            f"model.name {name!r} and model.python {keys['python']!r} are two models; keep one"
        )
        return None
    if name is None:
        name = huggingface.family_of(keys.get("model_type"))
        if name is None:
            pasted = "model_type" in keys
            missing = (
                f"model.name is missing; known: {', '.join(MODELS)} (or python = 'module:function')"
            )
            faults.append(huggingface.unknown_model_type(keys["model_type"]) if pasted else missing)
            return None
        keys["name"] = name
    if not isinstance(name, str) or name not in MODELS:
        faults.append(f"model.name {name!r} is unknown; {nearest(str(name), MODELS)}")
        return None
    if name in huggingface.MUST_BE:
        keys, refused = huggingface.digest(name, keys)
        faults += refused
    schema = MODELS[name]
    if issubclass(schema, TransformerConfig):
        hidden_size: JsonValue = keys.get("hidden_size")
        keys.setdefault(
            "intermediate_size", max(1, 4 * hidden_size) if isinstance(hidden_size, int) else 1
        )
    return read_section("model", schema, keys, faults)


def read_data(
    table: JsonMapping | None, model: ModelSection | None, faults: list[str]
) -> Data | None:
    """The section of a `[data]` table, random data without one; language models get a sequence
    length.
    """
    keys: JsonObject = {"name": "random"} if table is None else dict(table)
    if (
        keys.get("seq_len") is None
        and getattr(model, "name", None) in LANGUAGE_MODELS
        and "python" not in keys
    ):
        keys["seq_len"] = min(SEQ_LEN, longest_sequence(model) or SEQ_LEN)
    parts = keys.get("mixture")
    if isinstance(parts, (list, tuple)) and all(isinstance(part, Mapping) for part in parts):
        found = [
            read_section(f"data.mixture[{number}]", MixturePart, part, faults)
            for number, part in enumerate(parts)
        ]
        keys["mixture"] = tuple(found)
        if None in found:
            return None
    return read_section("data", Data, keys, faults)


def longest_sequence(model: ModelSection | None) -> int | None:
    """The positions that a model has, where its keys say so."""
    if isinstance(model, HuggingFaceConfig) and isinstance(model.config, dict):
        longest = model.config.get("max_position_embeddings", model.config.get("n_positions"))
        return longest if isinstance(longest, int) else None
    return getattr(model, "max_position_embeddings", None)


def read_eval(table: JsonMapping, model: ModelSection | None, faults: list[str]) -> Eval | None:
    """The section of an `[eval]` table; its data is read as `[data]` is."""
    keys: JsonObject = dict(table)
    data = keys.get("data")
    if isinstance(data, Mapping):
        inner: list[str] = []
        keys["data"] = read_data(data, model, inner)
        faults += [fault.replace("data.", "eval.data.", 1) for fault in inner]
        if inner:
            return None
    return read_section("eval", Eval, keys, faults)


def read_section(
    name: str, schema: type[AnySection], table: JsonMapping, faults: list[str]
) -> AnySection | None:
    """One section by its schema; adds a sentence for each key at fault and returns None when there
    are any.
    """
    keys_given = {key: value for key, value in table.items() if value is not None}
    if schema is Train and not _read_groups(keys_given, faults):
        return None
    try:
        return schema.model_validate(keys_given)
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            by_key.setdefault(str(detail["loc"][0]), []).append(detail)
        faults += [
            _sentence(name, schema, key, keys_given.get(key), details)
            for key, details in by_key.items()
        ]
        return None


def wrong_values(tables: Mapping[str, JsonMapping]) -> list[str]:
    """A sentence for each value of a partial config that its section refuses, the model aside."""
    faults: list[str] = []
    for name, table in tables.items():
        if name in SCHEMAS:
            read_section(name, SCHEMAS[name], table, faults)
    return [fault for fault in faults if " is missing" not in fault]


def _read_groups(given: JsonObject, faults: list[str]) -> bool:
    """Read the tables [[train.groups]] in place. Whether none of them has faults."""
    tables = given.get("groups")
    if not isinstance(tables, (list, tuple)):
        return True
    if not all(isinstance(table, Mapping) for table in tables):
        return True
    found = [
        read_section(f"train.groups[{number}]", ParameterGroup, table, faults)
        for number, table in enumerate(tables)
    ]
    given["groups"] = tuple(found)
    return None not in found


def unknown_section(name: str) -> str:
    """The refusal of a table that is no section, or of a key that stands before all of them."""
    return f"unknown section [{name}]; {where_section_is(name)}"


def where_section_is(name: str, key: str = "") -> str:
    """The clause that says what was meant by a name of no section, and by a key there if given."""
    if key in Train.model_fields and not nearest(name, SECTIONS).startswith("did you mean"):
        return f"did you mean 'train.{key}'?"
    if name in Train.model_fields:
        return "it is a key of [train]"
    return ELSEWHERE.get(name) or SECTIONS_OF_OTHERS.get(name) or nearest(name, SECTIONS)


def _sentence(
    section: str, schema: type[BaseModel], key: str, value: object, details: list[ErrorDetails]
) -> str:
    path = f"{section}.{key}"
    kind = details[0]["type"]
    if kind == "extra_forbidden":
        return f"unknown key {path}; {where_is(section, key, schema)}"
    if value is None and schema is HuggingFaceConfig and key == "config":
        return f"{path} is missing; give the path of a config.json, or a table of its keys"
    if value is None:
        return f"{path} is missing"
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    wanted = dict.fromkeys(
        [_LISTS[key]] if key in _LISTS else [_wanted(detail) for detail in details]
    )
    sentence = f"{path} = {shown} is wrong: it must be {' or '.join(wanted)}"
    if kind == "literal_error" and isinstance(value, str):
        near = nearest(value, re.findall("'([^']*)'", details[0]["ctx"]["expected"]))
        sentence += f"; {near}" if near.startswith("did you mean") else ""
    return sentence


def where_is(
    section: str, key: str, schema: type[BaseModel], more_known: Iterable[str] = ()
) -> str:
    """The clause on a key that a section does not have: the one that was meant, or whose it is."""
    near = nearest_key(section, key, [*schema.model_fields, *more_known])
    if not near.startswith("known"):
        return near
    families = [name for name, known in MODELS.items() if key in known.model_fields]
    others = [name for name, known in SCHEMAS.items() if key in known.model_fields]
    owners = [f"[{name}]" for name in others if name != section]
    if families and section != "model":
        owners = ["[model]", *owners]
    if owners:
        return f"it belongs to {' or '.join(owners)}"
    if schema is Python and key in _NAMES_OF_ARGUMENTS:
        return "did you mean 'arguments', the table of what the function takes?"
    if schema in _TABLES:
        return _TABLES[schema].replace("KEY", key)
    return f"it is a key of {', '.join(families)}" if families else near


_TABLES: Final[dict[type[BaseModel], str]] = {
    Python: "what the function takes goes into arguments = { KEY = ... }",
    HuggingFaceConfig: "a key of the library's config goes into config = { KEY = ... }",
}
"""Models whose own keys stand in a table inside `[model]`: where a key belongs."""
_NAMES_OF_ARGUMENTS: Final = frozenset(
    {"kwargs", "args", "params", "keywords", "init_args", "model_kwargs"}
)
_LISTS: Final = {
    "betas": "a list of two numbers from 0 to below 1",
    "files": "a list of paths",
    "weight": "a number of 0 or more, or a list of such",
    "groups": "a list of tables, each [[train.groups]]",
    "mixture": "a list of tables, each [[data.mixture]]",
    "from_step": "a list of steps",
    "to": "a list of tensorboard, wandb, mlflow",
    "shares": "a list of numbers above 0",
    "keep_gathered": "the number of the last blocks, a list of numbers of blocks from 0, or 'auto'",
    "no_decay": "a list of words in names of parameters",
    "targets": "a list of names of layers",
}
_KINDS: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a table",
    "model_type": "a table",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "greater_than": "more than {gt:g}",
    "less_than": "less than {lt:g}",
    "string_pattern_mismatch": "'module:function'",
}


def _wanted(detail: ErrorDetails) -> str:
    """The kind or the range that a key asks for, in words."""
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        return f"one of {context['expected'].replace(' or ', ', ')}"
    return _KINDS.get(detail["type"], detail["msg"]).format(**context)
