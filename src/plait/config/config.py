"""The config of a run: frozen sections, read from TOML or a mapping with overrides laid over
it.

Reading is strict and complete: an unknown key is an error, and all errors are said at once. A run
with an unintended default costs more than a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait import reference
from plait.config import read
from plait.config.rules import broken_rules
from plait.config.sections import SCHEMAS, Sections
from plait.errors import ConfigError
from plait.toml import parse_value, read_toml, write_toml
from plait.values import JsonMapping, JsonObject


@dataclass(frozen=True)
class Config(Sections):
    """A run: the model, the data, the training, the plan and the cluster.

    `federated` names the clients and the rules of `plait federated` alone. `recovery` says what
    happens to ranks that fail. `adapter` says what is trained beside a frozen model.
    """

    @staticmethod
    def load(source: str | Path | JsonMapping | Config, overrides: Sequence[str] = ()) -> Config:
        """The config of a TOML file or of a mapping of the same shape, with `section.key=value`
        overrides.

        Override values are TOML, or plain strings where they are not. Raises `ConfigError` listing
        every unknown key with the nearest known one, every value of a wrong kind, and every
        conflicting pair.
        """
        if isinstance(source, Config):
            source = source.as_dict()
        name = "config" if isinstance(source, Mapping) else str(source)
        if isinstance(source, Mapping):
            tables = source
        else:
            tables = read_toml(source, ConfigError)
            reference.look_beside(source, tables)
            tables = reference.beside(source, tables)
        faults: list[str] = []
        config = _read(_overridden(tables, overrides, faults), faults)
        if config is not None:
            faults += broken_rules(config)
        if faults or config is None:
            raise ConfigError(
                f"{name}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{name}:", *faults])
            )
        return config

    def as_dict(self) -> dict[str, dict[str, object]]:
        """The sections as plain data, defaults included; `Config.load` of it is this config
        again.
        """
        return {name: getattr(self, name).as_dict() for name in read.SECTIONS}

    def to_toml(self) -> str:
        """The text of a TOML file that loads as this config."""
        return write_toml(self.as_dict())


def load(source: str | Path | JsonMapping | Config, overrides: Sequence[str] = ()) -> Config:
    """See `Config.load`."""
    return Config.load(source, overrides)


def _read(tables: JsonMapping, faults: list[str]) -> Config | None:
    """The sections; None when one of them has faults, which are then added."""
    wrong = {name for name in read.SECTIONS if not isinstance(tables.get(name, {}), Mapping)}
    faults += [f"[{name}] must be a table of keys, not {tables[name]!r}" for name in sorted(wrong)]
    faults += [read.unknown_section(name) for name in tables if name not in read.SECTIONS]
    table = {name: {} if name in wrong else tables.get(name, {}) for name in read.SECTIONS}
    if "model" not in tables:
        faults.append("the section [model] is missing")
    model = (
        read.read_model(table["model"], faults)
        if "model" in tables and "model" not in wrong
        else None
    )
    sections: JsonObject = {
        "model": model,
        "data": read.read_data(table["data"] if "data" in tables else None, model, faults),
        "eval": read.read_eval(table["eval"], model, faults),
    }
    for name, schema in SCHEMAS.items():
        if name not in sections:
            sections[name] = read.read_section(name, schema, table[name], faults)
    if None in sections.values():
        return None
    return Config(**sections)


def _overridden(tables: JsonMapping, overrides: Sequence[str], faults: list[str]) -> JsonObject:
    """A copy of the tables with the overrides in their places."""
    result = _copied(tables)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            faults.append(
                f"override '{override}' is not of the form section.key=value, as in train.lr=1e-3"
            )
            continue
        if keys[0] not in read.SECTIONS:
            faults.append(
                f"override '{override}': unknown section '{keys[0]}'; "
                f"{read.where_section_is(*keys[:2])}"
            )
            continue
        inner = result
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                faults.append(
                    f"override '{override}': {key} is {inner!r}, which has no keys of its own"
                )
                break
        else:
            inner[keys[-1]] = parse_value(text.strip())
    return result


def _copied(tables: Mapping[str, object]) -> JsonObject:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in tables.items()
    }
