"""The check that all ranks of a run were started with one plan and one config.

A launcher hands all its ranks one job. Ranks of torchrun or of a batch script read a config each,
and a machine may have an older file. Nothing later would notice another learning rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.comm import World
    from plait.config import Config

_PLACES = frozenset(("interface", "files", "path", "cache", "tokenizer", "weights", "config"))
"""Last words of keys that name a place, which each machine may have elsewhere."""
_SHOWN = 3  # differences in a message


def check_alike(world: World, config: Config, plan: str) -> None:
    """Refuse to begin where ranks were started with several configs or plans. Collective.

    Raises:
        ConfigError: they were; it is the same on all ranks, and names what differs.
    """
    values = _values(config, plan)
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
    everybody = world.axis("world")
    if len(set(everybody.gather_objects(digest))) > 1:
        _refuse(everybody.gather_objects(values))


def _values(config: Config, plan: str) -> dict[str, str]:
    """The text of each value that all ranks must have alike, by its key."""
    values = {"the plan": plan}
    _flatten("", config.as_dict(), values)
    return values


def _flatten(prefix: str, table: Mapping[str, object], values: dict[str, str]) -> None:
    """Add the values of a table and of the tables in it, but for names of places."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            _flatten(f"{prefix}{key}.", value, values)
        elif key not in _PLACES and f"{prefix}{key}" != "cluster.name":
            values[f"{prefix}{key}"] = repr(value)


def _refuse(told: list[dict[str, str]]) -> None:
    """Name the first rank that differs from rank 0, and its differences."""
    first = told[0]
    rank, other = next((rank, one) for rank, one in enumerate(told) if one != first)
    keys = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
    shown = [
        f"{key} is {other.get(key, 'not set')} there and {first.get(key, 'not set')} on rank 0"
        for key in keys[:_SHOWN]
    ]
    if len(keys) > _SHOWN:
        shown.append(f"{len(keys) - _SHOWN} more keys differ")
    raise ConfigError(
        f"rank {rank} was started with another config than rank 0: {', '.join(shown)}; start all "
        "ranks with the same file, --plan and --set"
    )
