"""The table that says which of torch's two libraries multiplies float32 matrices on a processor.

A class of products has one entry: a kind, a range of rows and a range of multiplications. The
table is data: measured once a machine (`plait.products.measure`), kept in a file, and passed to the
code that multiplies. Knows no torch, so that the cost model reads it as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from plait.cache_folder import cache_folder
from plait.errors import ClusterError
from plait.values import JsonMapping, JsonObject, JsonValue

FORWARD: Final = "forward"
INPUT_GRAD: Final = "input_grad"
WEIGHT_GRAD: Final = "weight_grad"
KINDS: Final = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
ROWS: Final = (16, 128, 1024)
"""Smallest rows of each range. Fewer read the weight and do little with it: memory sets the pace,
and torch multiplies.
"""
MULTIPLICATIONS: Final = (1 << 21, 1 << 23, 1 << 26)
"""Smallest numbers of multiplications of each range; fewer are torch's."""
FILE_NAME: Final = "products.json"
"""File of a machine's tables, beside the probe's."""
VERSION: Final = 1

Ratio = tuple[float, float, float]
"""Seconds of oneDNN over seconds of torch's own: lower quartile, median, upper quartile."""


@dataclass(frozen=True, order=True)
class ProductClass:
    """A kind of product, and the smallest rows and multiplications of its ranges."""

    kind: str
    rows: int
    multiplications: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.rows}/{self.multiplications}"


CLASSES: Final = tuple(
    ProductClass(kind, rows, multiplications)
    for rows in ROWS
    for multiplications in MULTIPLICATIONS
    for kind in KINDS
)
_BY_TEXT: Final = {str(one): one for one in CLASSES}


@dataclass(frozen=True)
class ProductTable:
    """The classes that oneDNN multiplies; all others are torch's own.

    `ratios`: the measured ratios, by class; empty for a table that was not measured.
    """

    onednn: frozenset[ProductClass]
    ratios: Mapping[ProductClass, Ratio] = field(default_factory=dict, compare=False)

    @cached_property
    def _kinds(self) -> Mapping[tuple[int, int], frozenset[str]]:
        found: dict[tuple[int, int], frozenset[str]] = {}
        for one in self.onednn:
            place = ROWS.index(one.rows), MULTIPLICATIONS.index(one.multiplications)
            found[place] = found.get(place, frozenset()) | {one.kind}
        return found

    def kinds(self, rows: float, multiplications: float) -> frozenset[str]:
        """The kinds of product of such a layer that oneDNN multiplies."""
        place = bisect_right(ROWS, rows) - 1, bisect_right(MULTIPLICATIONS, multiplications) - 1
        return self._kinds.get(place, frozenset())

    def as_dict(self) -> JsonObject:
        """Plain data for a file: every class with its library, and its ratio where measured."""
        rows: dict[str, JsonObject] = {}
        for one in CLASSES:
            library = "onednn" if one in self.onednn else "torch"
            rows[str(one)] = {"library": library}
            if one in self.ratios:
                rows[str(one)]["ratio"] = list(self.ratios[one])
        return rows

    @classmethod
    def from_dict(cls, given: JsonValue) -> ProductTable:
        """The table that `as_dict` gave. Raises `ClusterError` for anything else."""
        if not isinstance(given, Mapping) or given.keys() != _BY_TEXT.keys():
            raise ClusterError("a table of products has other classes; run plait probe again")
        onednn = set()
        ratios = {}
        for text, row in given.items():
            library = row.get("library") if isinstance(row, Mapping) else None
            if library not in {"onednn", "torch"}:
                raise ClusterError(
                    f"table of products, {text}: the library {library!r} is neither onednn nor "
                    "torch; run plait probe again"
                )
            if library == "onednn":
                onednn.add(_BY_TEXT[text])
            if "ratio" in row:
                ratios[_BY_TEXT[text]] = _ratio(text, row["ratio"])
        return cls(frozenset(onednn), ratios)


def _ratio(text: str, given: JsonValue) -> Ratio:
    numbers = given if isinstance(given, list) else []
    if len(numbers) != 3 or not all(isinstance(one, float) and one > 0 for one in numbers):
        raise ClusterError(
            f"table of products, {text}: the ratio {given!r} is not three positive numbers; "
            "run plait probe again"
        )
    return numbers[0], numbers[1], numbers[2]


TORCH: Final = ProductTable(frozenset())
"""Torch's own products everywhere."""
RULE: Final = ProductTable(frozenset(CLASSES))
"""Table that has oneDNN from the first range on: a fixed choice, for tests and simulated ranks."""
FIXED: Final[Mapping[str, ProductTable]] = {"rule": RULE, "torch": TORCH}


@dataclass(frozen=True)
class ProductConditions:
    """The circumstances under which a table holds."""

    processor: str
    torch_version: str
    num_threads: int

    def __str__(self) -> str:
        return f"{self.processor}, torch {self.torch_version}, threads {self.num_threads}"


def read_table(path: Path, machine: ProductConditions | str) -> ProductTable | None:
    """The table kept for these circumstances; None without one, or where it is damaged."""
    try:
        kept = json.loads(path.read_text())
        if kept["version"] != VERSION:
            return None
        return ProductTable.from_dict(kept["tables"][str(machine)])
    except (OSError, ValueError, LookupError, TypeError, ClusterError):
        return None


def table_of_probe(host: JsonMapping) -> ProductTable:
    """The table for the circumstances of a probe, from the file that training reads as well.

    Where none is kept, as after a busy probe, it is torch's own. A table that `host` brings along
    goes before; raises `ClusterError` where that is wrong.
    """
    if "products" in host:
        return ProductTable.from_dict(host["products"])
    kept = read_table(cache_folder() / FILE_NAME, str(host.get("machine")))
    return TORCH if kept is None else kept


def keep_table(path: Path, machine: ProductConditions, table: ProductTable) -> None:
    """Write the table beside those of other circumstances, in one go.

    A folder that cannot be written is no error: the next run measures again.
    """
    tables = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(path.read_text())
        tables = dict(kept["tables"]) if kept["version"] == VERSION else {}
    tables[str(machine)] = table.as_dict()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"version": VERSION, "tables": tables}, indent=2) + "\n")
        part.replace(path)


def processor_name() -> str:
    """The name that Linux gives the processor, else the architecture."""
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = ()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
