"""The question of an estimate: the tables of a config, read and checked as a whole before any
computing.

The sections are those of `plait.config` and are refused alike. A [model] may say more here than
`plait train` can run. Other families' names of keys are read, and a pasted config.json of a family
without code here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from plait import reference
from plait.config.huggingface import MUST_BE, NO_EFFECT, has_no_effect, known_keys
from plait.errors import ConfigError, nearest
from plait.plan import Plan
from plait.predict.cost.model.describe import ALIASES, DESCRIBED, library_config
from plait.predict.cost.model.families import is_known
from plait.predict.cost.model.from_config import is_made
from plait.predict.cost.model.known import known_tables
from plait.predict.cost.model.plain import plain_faults
from plait.toml import parse_json, parse_value, read_toml
from plait.values import JsonMapping, JsonValue

GLOBAL_BATCH = 16
"""Samples of a step where neither the config says how many nor the devices ask for more: as `plait
train` takes them.
"""
SAMPLES_PER_DEVICE = 4


def config_tables(config: JsonMapping | str | Path, *, with_model: bool = True) -> JsonMapping:
    """The tables of a config: a mapping as it is, a TOML file, or a Hugging Face config.json as the
    model. The name of a known model is taken as well, and a file of that name comes first. Who
    needs no model (`with_model`) need not have one that is whole.

    Raises `ConfigError` listing every key that no model or section has and every value of the wrong
    kind.
    """
    if not isinstance(config, Mapping) and hasattr(config, "as_dict"):
        config = config.as_dict()
    if isinstance(config, Mapping):
        tables = (
            config
            if "model" in config or set(config) <= {"data", "train", "plan", "cluster"}
            else {"model": config}
        )
    elif not isinstance(config, (str, Path)):
        raise ConfigError(
            f"a config is a path or a mapping of tables, not {type(config).__name__} {config!r}"
        )
    elif isinstance(config, str) and _is_name(config):
        tables = known_tables(config)
    elif Path(config).suffix == ".json":
        tables = {"model": _json(Path(config))}
    else:
        tables = read_toml(config, ConfigError)
        reference.look_beside(config, tables)
        tables = reference.beside(config, tables)
    check_tables(tables if with_model else {**tables, "model": {"model_type": ""}})
    return tables


def _is_name(text: str) -> bool:
    """Whether a text can only be a known model's name: no file is meant, and none has it."""
    return not (text.endswith((".toml", ".json")) or _exists(text))


def _exists(name: str) -> bool:
    """Whether a file or folder has this name; no system has one of thousands of letters."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> JsonMapping:
    """The tables of `config_tables` with `section.key=value` overrides.

    Raises `ConfigError` for an override that is no assignment.
    """
    return overridden(config_tables(path), overrides)


def overridden(given: JsonMapping, overrides: Sequence[str]) -> JsonMapping:
    """The tables with `section.key=value` overrides laid over a copy.

    Raises `ConfigError` for an override that is no assignment.
    """
    tables = {
        section: dict(table) if isinstance(table, Mapping) else table
        for section, table in given.items()
    }
    for override in overrides:
        path_text, equals, value = override.partition("=")
        section, *names = path_text.strip().split(".")
        if not equals or not names or not section or not all(names):
            raise ConfigError(
                f"--set {override!r}: write section.key=value, for example train.global_batch=64"
            )
        inner = tables.setdefault(section, {})
        for name in names[:-1]:
            inner[name] = (
                dict(inner[name]) if isinstance(inner.get(name), Mapping) else inner.get(name, {})
            )
            inner = inner[name]
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--set {override!r}: {name} is {inner!r}, which has no keys of its own"
                )
        inner[names[-1]] = parse_value(value.strip())
    check_tables(tables)
    return tables


def _json(path: Path) -> JsonMapping:
    try:
        table = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{path}: cannot be read as JSON: {cause}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a config.json is one JSON object")
    return table


def check_tables(tables: JsonMapping) -> None:
    """Refuse what nothing reads and what cannot be. Raises `ConfigError` with a sentence for each
    fault.
    """
    faults = [] if "model" in tables else ["the section [model] is missing"]
    if find_spec("pydantic") is None:
        faults += plain_faults(tables)
    else:
        faults += _schema_faults(tables)
    if faults:
        raise ConfigError(faults[0] if len(faults) == 1 else "\n  ".join(["config:", *faults]))


def _schema_faults(tables: JsonMapping) -> list[str]:
    from plait.config import read
    from plait.config.sections import SCHEMAS

    faults: list[str] = []
    for section, table in tables.items():
        if section not in read.SECTIONS:
            faults.append(read.unknown_section(str(section)))
        elif isinstance(table, Mapping) and section == "model":
            _check_model(table, faults)
        elif isinstance(table, Mapping) and section == "eval":
            read.read_eval(table, None, faults)
        elif isinstance(table, Mapping):
            _check_alone(read.read_section(section, SCHEMAS[section], table, faults), faults)
        elif section != "model" or not hasattr(table, "named_modules"):
            faults.append(f"[{section}] must be a table of keys, not {table!r}")
    return faults


def _check_alone(value: object, faults: list[str]) -> None:
    """Rules between the keys of `[adapter]` or `[recovery]`, which no other section matters to."""
    from plait.config import ClusterSection, Data, PlanSection, Train
    from plait.config.adapter import AdapterConfig
    from plait.config.model import ModelSection
    from plait.config.rules import adapters_have_a_kind, new_plans_are_named
    from plait.config.sections import Recovery, Sections

    rest = Sections(ModelSection(), Data(name="random"), Train(), PlanSection(), ClusterSection())
    if isinstance(value, AdapterConfig):
        faults += adapters_have_a_kind(replace(rest, adapter=value))
    elif isinstance(value, Recovery):
        faults += new_plans_are_named(replace(rest, recovery=value))


def _check_model(table: JsonMapping, faults: list[str]) -> None:
    """A model that has code here is held to its schema. One that only a description reads is held
    to the names of its keys.
    """
    from plait.config import MODELS, read

    if "python" in table:
        if not set(table) & {"num_attention_heads", "name"}:
            read.read_model(table, faults)
        return
    name = table.get("name")
    if name is None:
        if "model_type" not in table:
            faults.append(
                f"model.name is missing; known: {', '.join(MODELS)} (or model_type, as in a "
                "pasted config.json)"
            )
        return
    if not isinstance(name, str) or name not in MODELS:
        faults.append(f"[model] name {name!r} is unknown; {nearest(str(name), MODELS)}")
        return
    own = set(MODELS[name].model_fields)
    if set(table) <= own:
        _check_whole(read.read_model(table, faults), faults)
        return
    known = _known_keys(own) | known_keys(name)
    for key in map(str, table):
        if key not in known and not (name in MUST_BE and has_no_effect(key)):
            where = read.where_is("model", key, MODELS[name], sorted(known - own))
            faults.append(f"unknown key model.{key}; {where}")


def _check_whole(model: JsonValue, faults: list[str]) -> None:
    """Rules that hold between the keys of a model."""
    from plait.config import ClusterSection, Data, PlanSection, Train
    from plait.config.config import Config
    from plait.config.rules import broken_rules

    if model is not None:
        faults += broken_rules(
            Config(model, Data(name="random"), Train(), PlanSection(), ClusterSection())
        )


def _known_keys(own: set[str]) -> set[str]:
    """The keys of a model, with the names that other families give them and those that only a
    description reads.
    """
    if "num_attention_heads" not in own:
        return own
    aliases = {alias for key in own for alias in ALIASES.get(key, ())}
    return own | aliases | NO_EFFECT | DESCRIBED


def global_batch(tables: JsonMapping, num_devices: int, plan: Plan | None = None) -> int:
    """Samples of a step: the config's, else some for each device. There is one at least for each
    micro-batch of a plan.
    """
    given = tables.get("train", {}).get("global_batch")
    if given:
        return int(given)
    shares = plan.dp.size * plan.micro_batches if plan is not None else 1
    return max(GLOBAL_BATCH, SAMPLES_PER_DEVICE * num_devices, shares)


def with_lengths(tables: JsonMapping) -> JsonMapping:
    """The tables with the length of a sequence as `plait train` reads a [data] that has none."""
    model = tables["model"]
    data = tables.get("data")
    if data is None or data.get("seq_len") or "python" in data or "name" not in model:
        return tables
    from plait.config.model import LANGUAGE_MODELS
    from plait.config.read import SEQ_LEN

    if model["name"] not in LANGUAGE_MODELS:
        return tables
    longest = model.get("max_position_embeddings") or SEQ_LEN
    return {**tables, "data": {**data, "seq_len": min(SEQ_LEN, longest)}}


def family_of(model: JsonValue) -> str:
    """The `model_type` of a pasted or named config, of its language model where it has several
    parts. Nothing where there is none.
    """
    if not isinstance(model, Mapping):
        return ""
    inner = library_config(model) if model.get("name") == "hf" else model.get("config", model)
    if not isinstance(inner, Mapping):
        return ""
    family = str(inner.get("model_type") or "")
    text = inner.get("text_config")
    return str(text.get("model_type") or family) if isinstance(text, Mapping) else family


def _described_otherwise(model: JsonMapping) -> list[str]:
    """Sentences where the description is of another model than the config's."""
    inner = library_config(model) if model.get("name") == "hf" else model
    sentences = []
    if isinstance(inner.get("text_config"), Mapping):
        sentences.append(
            f"model_type '{inner.get('model_type')}' has parts beside its text_config: its "
            "language model alone is described"
        )
    family = family_of(model)
    if family and not is_known(family):
        sentences.append(
            f"model_type '{family}' has no entry here: it is described as if it were built like "
            "Llama, and its weights may be counted wrong"
        )
    return sentences


def assumed(tables: JsonMapping, batch: int, seq_len: int) -> list[str]:
    """Assumptions where the config left something open."""
    assumptions = []
    if not tables.get("train", {}).get("global_batch"):
        assumptions.append(f"train.global_batch is not given: {batch} samples a step are assumed")
    model = tables["model"]
    is_seen = isinstance(model, Mapping) and is_made(model)  # a sample was looked at
    if not tables.get("data", {}).get("seq_len") and seq_len > 1 and not is_seen:
        assumptions.append(f"data.seq_len is not given: samples of {seq_len} tokens are assumed")
    optimizer = str(tables.get("train", {}).get("optimizer", ""))
    if ":" in optimizer:
        assumptions.append(f"train.optimizer '{optimizer}' is not known: state of AdamW is assumed")
    groups = tables.get("train", {}).get("groups") or ()
    if any(group.get("freeze") for group in groups):
        assumptions.append("train.groups freeze parameters: estimated as if these trained too")
        if tables["train"].get("messages") == "bf16":
            assumptions.append(
                "train.messages 'bf16' halves what every stage sends here: in a run a stage sends "
                "whole activations where nothing trains before its end"
            )
    cluster = tables.get("cluster", {})
    if cluster.get("transport") == "sockets" and cluster.get("name", "local") == "local":
        assumptions.append(
            "cluster.transport 'sockets' has no price: messages are priced as this machine's ranks "
            "were measured, which share memory"
        )
    if isinstance(tables["model"], Mapping):
        assumptions += _described_otherwise(tables["model"])
    return assumptions
