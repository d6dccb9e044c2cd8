"""A processor as `plait probe` measured it: seconds of operations, of the engine itself, and of
collectives by number of ranks.

A data sheet and a few efficiencies describe an accelerator. A processor is slow in ways of its own,
so each is measured. Its activations leave the caches, Python runs between small products, and its
ranks share cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from plait.cluster.bounds import Bounds, number_faults
from plait.cluster.products import TORCH, ProductTable, table_of_probe
from plait.errors import ClusterError
from plait.values import JsonMapping, JsonValue

KINDS: Final = (
    "add",
    "norm",
    "rms",
    "group",
    "activation",
    "gate",
    "relu",
    "rotary",
    "permute",
    "lookup",
    "loss",
)
"""Operations bound by memory."""
SECONDS: Final = (
    *(
        f"{kind}_{way}"
        for kind in (*KINDS, "attention", "score", "convolution_flop", "convolution_weight")
        for way in ("forward", "backward")
    ),
    *(
        "product_start",
        "product_flop",
        "product_number",
        "plain_flop",
        "plain_number",
        "bias",
        "update",
        "fresh",
    ),
)
RULE: Final = ("met_at_once",)
VERSION: Final = 4
"""Version of the measurements: a probe of another version is no probe."""
ENGINE: Final = ("step", "micro_batch", "expert", "stretch", "idle")
MEETINGS: Final = ("call", "grid", "visit", "turn", "bucket", "unit", "hand")
FAMILIES: Final = ("gpt", "llama", "experts", "resnet", "mlp")
REMAT: Final = ("none", "full", "selective")
OPS: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "send"),
    *("staged_all_reduce", "staged_all_gather", "staged_reduce_scatter"),
)
_TIME = Bounds(0, 1e3, "seconds")
_RATE = Bounds(1e3, 1e15, "bytes/s")
_COUNT = Bounds(0, 1e15, "")


@dataclass(frozen=True, eq=False)
class CpuProfile:
    """Seconds that a rank takes of its core.

    `seconds`: for each number, flop, weight, or score of attention's whole square. A `product` is
    one that oneDNN makes, by the table of `products`; others are `plain`. `engine`: seconds of the
    engine itself, of a step, a micro-batch, a chunk of an expert. `stretch` is the ratio of a step
    to the sum of its parts. `idle` is the ratio of the time of ranks that share cores to their
    work. `meetings`: what is lost beside the work when ranks meet, by kind and number of ranks (see
    `plait.predict.probe.meetings`). `blocks`: what the engine takes for a block forward and
    backward, by family and recomputation. `memory_bytes`: of a rank that holds no model. `links`:
    by number of ranks, by operation, (seconds of a small message, bytes/s sent). They are of
    tensors that peers read in place and of others (`staged`). `met_at_once`: keys of a ring that
    attention meets at once; one rank's at a time where it is not said.
    """

    seconds: Mapping[str, float]
    engine: Mapping[str, float]
    meetings: Mapping[str, Mapping[int, float]]
    blocks: Mapping[str, Mapping[str, float]]
    memory_bytes: float
    links: Mapping[int, Mapping[str, tuple[float, float]]]
    products: ProductTable
    met_at_once: float = 1.0


def profile_of_host(host: JsonValue) -> CpuProfile:
    """The profile that a probe file calls `host`. Raises `ClusterError` with every wrong number."""
    if isinstance(host, Mapping) and host.get("version") != VERSION:
        raise ClusterError(
            "cluster 'local': it was measured by another version of plait; run plait probe again"
        )
    wrong: list[str] = []
    whole = _table("", host, wrong)
    seconds, engine, rule = (
        _table(prefix, whole.get(prefix), wrong) for prefix in ("seconds", "engine", "rule")
    )
    wrong += _faults("seconds", seconds, SECONDS, _TIME)
    wrong += _faults("engine", engine, ENGINE, _TIME)
    wrong += _faults("rule", rule, RULE, _COUNT)
    wrong += number_faults("host.engine.memory", engine.get("memory"), Bounds(1e6, 1e13, "bytes"))
    blocks = _table("engine.blocks", engine.get("blocks"), wrong)
    for family in FAMILIES:
        by_remat = _table(f"engine.blocks.{family}", blocks.get(family), wrong)
        wrong += _faults(f"engine.blocks.{family}", by_remat, REMAT, _TIME)
    meetings = {name: _table(f"engine.{name}", engine.get(name), wrong) for name in MEETINGS}
    for name, by_ranks in meetings.items():
        wrong += _faults(f"engine.{name}", by_ranks, by_ranks, _TIME)
    links = _links_of(whole, wrong)
    table_of_products = _table_of_products(whole, wrong)
    if wrong:
        first = "cluster 'local': the measurements are wrong; run plait probe again"
        raise ClusterError("\n  ".join([first, *wrong]))
    return CpuProfile(
        _numbers(seconds, SECONDS),
        _numbers(engine, ENGINE),
        {name: seconds_by_count(by_ranks) for name, by_ranks in meetings.items()},
        {family: _numbers(blocks[family], REMAT) for family in FAMILIES},
        float(engine["memory"]),
        links,
        table_of_products,
        float(rule["met_at_once"]),
    )


def _table(name: str, value: JsonValue, wrong: list[str]) -> JsonMapping:
    """The value where it is a table; else an empty one, and a sentence more in `wrong`."""
    if not isinstance(value, Mapping):
        wrong.append(f"host.{name} is missing, a table of numbers")
        return {}
    return value


def _faults(
    table: str, numbers: JsonMapping, names: Iterable[str], bounds: Bounds
) -> Iterator[str]:
    """A sentence for each number of a table that is missing or out of bounds."""
    for name in names:
        yield from number_faults(f"host.{table}.{name}", numbers.get(name), bounds)


def _links_of(host: JsonMapping, wrong: list[str]) -> dict[int, dict[str, tuple[float, float]]]:
    """(seconds of latency, bytes a second) of each operation, by number of ranks.

    Numbers at fault get their sentences in `wrong`.
    """
    links: dict[int, dict[str, tuple[float, float]]] = {}
    for count, operations in _table("links", host.get("links"), wrong).items():
        for operation in OPS:
            pair = operations.get(operation) if isinstance(operations, Mapping) else None
            latency, rate = (*(pair or ()), None, None)[:2]
            wrong += number_faults(f"host.links.{count}.{operation}", latency, _TIME)
            wrong += number_faults(f"host.links.{count}.{operation}", rate, _RATE)
            if not wrong:
                links.setdefault(int(count), {})[operation] = (float(latency), float(rate))
    return links


def seconds_by_count(seconds: JsonMapping) -> dict[int, float]:
    """Seconds by number of ranks, from a table whose keys are words, as those of JSON."""
    return {int(count): float(spent) for count, spent in seconds.items()}


def _numbers(table: JsonMapping, names: Iterable[str]) -> dict[str, float]:
    """The named entries of a table that was found right."""
    return {name: float(table[name]) for name in names}


def _table_of_products(given: JsonMapping, wrong: list[str]) -> ProductTable:
    """The table of a probe; what is wrong with it is added to `wrong`."""
    try:
        return table_of_probe(given)
    except ClusterError as error:
        wrong.append(f"host.products: {error}")
        return TORCH
