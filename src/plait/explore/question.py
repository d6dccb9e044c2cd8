"""A question as a page asks it: choices by name in, the tables of a config and option words out.

What comes from a page never names a file or code of this machine. The CONFIG and the cluster file
of the command line are the exceptions, since their user named them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plait.errors import ClusterError, ConfigError, nearest
from plait.predict.cost.api import cluster_name
from plait.predict.cost.model.known import KNOWN
from plait.predict.cost.model.tables import config_tables, overridden
from plait.toml import is_file, parse_json, parse_toml
from plait.values import JsonMapping

Choices = Mapping[str, Sequence[str]]
"""The values of a query by name, as `urllib.parse.parse_qs` gives them."""

ALIASES: Final = {
    "config": "model",
    "gpus": "devices",
    "num_devices": "devices",
    "num_gpus": "devices",
    "global_batch": "batch",
    "seq_len": "sequence",
    "sequence_length": "sequence",
}
OVERRIDES: Final = {
    "batch": "train.global_batch",
    "sequence": "data.seq_len",
    "keep": "plan.keep_gathered",
}
"""Choices that are keys of the config."""
OPTIONS: Final = {
    "cluster": "--cluster",
    "devices": "--gpus",
    "framework": "--framework",
    "objective": "--objective",
    "risk": "--risk",
    "top": "--top",
    "plan": "--plan",
}
"""Choices that are options of a verb."""
NAMES: Final = ("model", *OVERRIDES, *OPTIONS, "explain", "timeline")
MOST_SHOWN: Final = 60
"""Letters of a pasted text that an error repeats."""
FIRST_CLUSTER: Final = "h100x512"
"""The cluster of a page that is opened without a config."""


@dataclass(frozen=True)
class Opening:
    """The question of the command line, with which the page and every question begin."""

    tables: JsonMapping
    cluster: str | None = None
    name: str = ""
    """The CONFIG, or the known model."""

    @property
    def cluster_name(self) -> str:
        """The cluster that is meant: the command line's, else the config's own."""
        return self.cluster or cluster_name(self.tables)

    @property
    def is_local(self) -> bool:
        """Whether the cluster is this machine, which may have to be measured."""
        return self.cluster_name.strip() == "local"

    def tables_for(self, choices: Choices) -> JsonMapping:
        """The tables of a question's config. Errors: `ConfigError`."""
        text = one(choices, "model")
        tables = model_tables(text) if text and text.strip() != self.name else self.tables
        laid_over = [
            f"{key}={value}"
            for name, key in OVERRIDES.items()
            if (value := one(choices, name)) is not None
        ]
        return overridden(tables, laid_over) if laid_over else tables

    def words_for(self, choices: Choices, options: Sequence[str]) -> list[str]:
        """The words of some options of a verb. Errors: `ClusterError` for a file that the command
        line did not name.
        """
        words = []
        for name in options:
            value = one(choices, name)
            if name == "cluster":
                value = self._cluster(value)
            if value is not None:
                words.append(f"{OPTIONS[name]}={value}")
        if "explain" in choices:
            words += ["--explain", *(text for text in choices["explain"] if text not in {"", "1"})]
        if "timeline" in choices:
            words.append("--timeline")
        return words

    def _cluster(self, value: str | None) -> str | None:
        if value is None or value == self.cluster:
            return self.cluster
        if value.endswith(".toml") or "/" in value or is_file(value):
            raise ClusterError(
                f"cluster '{value}': a file is named on the command line, plait explore --cluster "
                "FILE; here a cluster is PRESETxCOUNT or local"
            )
        return value


def known_name(choices: Choices) -> Choices:
    """The choices with the names that the page uses. Errors: `ConfigError` for an unknown one."""
    named: dict[str, Sequence[str]] = {}
    for given, values in choices.items():
        name = ALIASES.get(given, given)
        if name not in NAMES:
            raise ConfigError(f"a question has no '{given}'; {nearest(given, NAMES)}")
        named[name] = values
    return named


def one(choices: Choices, name: str) -> str | None:
    """The last value of a choice; None where it is left open or empty."""
    values = choices.get(name, ())
    return values[-1].strip() or None if values else None


def model_tables(text: str) -> JsonMapping:
    """The tables that a text means: a known model, a pasted config.json, or a pasted TOML config.

    Errors: `ConfigError`, also for a text that names code or files of this machine.
    """
    text = text.strip()
    if text.lower() in KNOWN:
        return KNOWN[text.lower()].tables
    if text.startswith("{"):
        try:
            table = parse_json(text)
        except ValueError as cause:
            raise ConfigError(f"the pasted config cannot be read as JSON: {cause}") from None
    elif "=" in text or text.startswith("["):
        table = parse_toml(text, ConfigError, "the pasted config")
    else:
        raise ConfigError(
            f"no model is known as '{_shortened(text)}'; {nearest(text.lower(), KNOWN)} "
            "(or paste a config.json)"
        )
    model = table.get("model", table)
    if isinstance(model, Mapping):
        refuse_references(model)
    return config_tables(table)


def _shortened(text: str) -> str:
    """The beginning of a text on one line: a whole file may have been pasted."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN - 3]}..."


def refuse_references(model: JsonMapping) -> None:
    """Raises `ConfigError` for a pasted model that is code, or a file, of this machine."""
    if "python" in model:
        raise ConfigError(
            "a pasted config cannot name code (model.python); start plait explore with the file"
        )
    for key in ("config", "weights"):
        if isinstance(model.get(key), str):
            raise ConfigError(
                f"a pasted config cannot name files (model.{key}); paste the config.json itself"
            )
