"""Sweeps: the best plan at each number of devices, samples a step and tokens a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from plait.cluster import Cluster
from plait.errors import ConfigError, nearest
from plait.predict.cost.api import cluster_of
from plait.predict.cost.frameworks import Framework
from plait.predict.cost.model.tables import config_tables
from plait.predict.cost.records import Estimate
from plait.predict.planner.choose import Choice, NothingFits, decide
from plait.values import JsonMapping

MOST_POINTS: Final = 200
"""Searches of one sweep; each takes up to some seconds."""
KEYS: Final = ("devices", "batch", "length")


@dataclass(frozen=True)
class SweepAxes:
    """The values that are tried. An empty axis keeps what config and cluster say."""

    devices: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    """Samples a step."""
    lengths: tuple[int, ...] = ()
    """Tokens a sample."""

    @staticmethod
    def parse(words: Sequence[str]) -> SweepAxes:
        """`devices=8..1024 batch=64,128 length=4096`; two dots double from one end to the other.

        Raises `ConfigError` for a key that is not swept, and for values that are no whole numbers.

        >>> SweepAxes.parse(["devices=8..32", "batch=64,96"])
        SweepAxes(devices=(8, 16, 32), batches=(64, 96), lengths=())
        """
        values: dict[str, tuple[int, ...]] = {}
        for word in words:
            key, equals, text = word.partition("=")
            if key not in KEYS:
                raise ConfigError(f"--sweep {word!r}: {nearest(key, KEYS)}")
            if not equals or key in values:
                raise ConfigError(f"--sweep {word!r}: say each key once, as {key}=8,16,32")
            values[key] = _numbers(word, text)
        axes = SweepAxes(*(values.get(key, ()) for key in KEYS))
        if not values or axes.size > MOST_POINTS:
            raise ConfigError(
                f"--sweep has {axes.size if values else 0} points; ask for 1 to {MOST_POINTS}, as "
                "devices=8..1024"
            )
        return axes

    @property
    def size(self) -> int:
        """Points of the sweep."""
        sizes = [len(axis) or 1 for axis in (self.devices, self.batches, self.lengths)]
        return sizes[0] * sizes[1] * sizes[2]


def _numbers(word: str, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for piece in text.split(","):
        first, dots, last = piece.partition("..")
        ends = [first, last] if dots else [first]
        if not all(end.isascii() and end.isdigit() and 0 < len(end) < 10 for end in ends):
            raise ConfigError(f"--sweep {word!r}: '{piece}' is no whole number, and no range 8..64")
        low, high = int(ends[0]), int(ends[-1])
        if not 0 < low <= high:
            raise ConfigError(f"--sweep {word!r}: '{piece}' has no numbers from 1 on")
        while low <= high:
            numbers.append(low)
            low *= 2
    return tuple(dict.fromkeys(numbers))


@dataclass(frozen=True)
class SweepPoint:
    """One search: what was asked, and the best plan or the reason for which there is none."""

    num_devices: int
    batch: int | None
    length: int | None
    best: Estimate | None
    reason: str = ""


def sweep(
    config: JsonMapping | str | Path,
    cluster: Cluster | str | None,
    axes: SweepAxes,
    *,
    objective: str = "time",
    framework: Framework | str = "plait",
    risk: float | None = None,
    fix: str = "",
) -> list[SweepPoint]:
    """The best plan at each point, devices slowest. Where batches are not swept and the config has
    none, the batch grows with the devices.
    """
    tables = config_tables(config)
    whole = cluster_of(tables, cluster)
    ask = partial(decide, objective=objective, framework=framework, risk=risk, fix=fix)
    return [
        _point(asked, whole.with_num_devices(devices), ask)
        for devices, asked in _asked(tables, whole.num_devices, axes)
    ]


def _asked(tables: JsonMapping, usual: int, axes: SweepAxes) -> Iterator[tuple[int, JsonMapping]]:
    """The number of devices and the tables of each point."""
    lists = ((axes.devices or (usual,)), (axes.batches or (None,)), (axes.lengths or (None,)))
    for devices, batch, length in product(*lists):
        changed = {key: dict(table) for key, table in tables.items() if key != "model"}
        changed["model"] = tables["model"]
        if batch is not None:
            changed.setdefault("train", {})["global_batch"] = batch
        if length is not None:
            changed.setdefault("data", {})["seq_len"] = length
        yield devices, changed


def _point(tables: JsonMapping, cluster: Cluster, ask: Callable[..., Choice]) -> SweepPoint:
    batch = tables.get("train", {}).get("global_batch")
    length = tables.get("data", {}).get("seq_len")
    try:
        choice = ask(tables, cluster)
    except NothingFits as reason:
        return SweepPoint(cluster.num_devices, batch, length, None, str(reason))
    job = choice.job
    return SweepPoint(cluster.num_devices, job.global_batch, job.model.seq_len, choice.plans[0])
