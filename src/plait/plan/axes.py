"""The axes of a plan: one frozen record each, which prints itself as its term
(`dp4:zero3,replicate2`).

The words of the grammar live here and in `facts`, so that parser, rules, planner and command line
read one list. A record is pure data: whether its numbers fit together is
asked by `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Final, Literal, get_args

from plait.plan.facts import (
    DATA_STRATEGIES,
    DEFAULT_SCHEDULE,
    PIPELINE_SCHEDULES,
    SCHEDULES,
    DataStrategy,
    PipelineSchedule,
)
from plait.plan.precisions import PRECISIONS, Precision

TensorMode = Literal["1d", "2d", "2.5d", "3d"]
ContextStrategy = Literal["ring", "ulysses"]
BlockRemat = Literal["none", "selective", "full"]
Remat = Literal[BlockRemat, "auto"]

TENSOR_MODES: Final[tuple[str, ...]] = get_args(TensorMode)
CONTEXT_STRATEGIES: Final[tuple[str, ...]] = get_args(ContextStrategy)
REMATS: Final[tuple[BlockRemat, ...]] = get_args(BlockRemat)
"""Recomputation of one block, least first."""
REMAT_WORDS: Final[tuple[Remat, ...]] = get_args(Remat)
"""Recomputation of a plan: a word for all blocks, or `auto` for a word of each by memory."""


__all__ = [
    "CONTEXT_STRATEGIES",
    "DATA_STRATEGIES",
    "PIPELINE_SCHEDULES",
    "PRECISIONS",
    "REMATS",
    "REMAT_WORDS",
    "TENSOR_MODES",
    "BlockRemat",
    "ContextAxis",
    "ContextStrategy",
    "DataAxis",
    "DataStrategy",
    "PipelineAxis",
    "PipelineSchedule",
    "Precision",
    "Remat",
    "TensorAxis",
    "TensorMode",
    "cube_root",
    "default_virtual",
]


def _term(head: str, word: str, default: str, options: list[str]) -> str:
    """`head`, then the word when it is not the default or when options follow it."""
    if not options and word == default:
        return head
    return f"{head}:{','.join([word, *options])}"


@dataclass(frozen=True)
class DataAxis:
    """Split the batch over `size` ranks; `strategy` says how gradients and optimizer state are
    kept.

    `stale` (async-server): the most updates by which a worker's weights may lag. `every` (local):
    the steps between two averagings. `replicate` (ZeRO): the number of groups that each hold one
    whole sharded copy. `offload` (ZeRO): the optimizer state stays in host memory.
    """

    size: int = 1
    strategy: DataStrategy = "allreduce"
    stale: int | None = None
    every: int | None = None
    replicate: int = 1
    offload: bool = False

    @property
    def shard(self) -> int:
        """The number of ranks over which one copy is sharded (size / replicate)."""
        return self.size // self.replicate

    def __str__(self) -> str:
        options = [] if self.stale is None else [f"stale{self.stale}"]
        options += [] if self.every is None else [f"every{self.every}"]
        options += [] if self.replicate == 1 else [f"replicate{self.replicate}"]
        options += ["offload"] if self.offload else []
        return _term(f"dp{self.size}", self.strategy, "allreduce", options)


@dataclass(frozen=True)
class TensorAxis:
    """Split every layer over `size` ranks: 1d, q x q (2d), q x q x depth (2.5d) or q x q x q
    (3d).
    """

    size: int = 1
    mode: TensorMode = "1d"
    sequence_parallel: bool = False
    depth: int = 1

    @property
    def q(self) -> int:
        """The side of the grid, rounded down where the size is no square or cube; the size itself
        for 1d.
        """
        if self.mode == "1d":
            return self.size
        if self.mode == "3d":
            return cube_root(self.size)
        return isqrt(self.size // self.depth)

    def __str__(self) -> str:
        options = ["sp"] if self.sequence_parallel else []
        options += [] if self.depth == 1 else [f"depth{self.depth}"]
        return _term(f"tp{self.size}", self.mode, "1d", options)


@dataclass(frozen=True)
class PipelineAxis:
    """Split the model in depth over `size` ranks, each holding `virtual` stages.

    `virtual` 0 asks for what the schedule means without the option: 2 for interleaved and the V
    schedules, else 1.
    """

    size: int = 1
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    virtual: int = 0

    def __post_init__(self) -> None:
        if self.virtual == 0:
            object.__setattr__(self, "virtual", default_virtual(self.schedule))

    @property
    def num_stages(self) -> int:
        """The pieces into which the model is cut."""
        return self.size * self.virtual

    def __str__(self) -> str:
        default = default_virtual(self.schedule)
        needed = self.schedule in SCHEDULES and SCHEDULES[self.schedule].needs_virtual
        written = needed or self.virtual != default
        options = [f"v{self.virtual}"] if written else []
        return _term(f"pp{self.size}", self.schedule, DEFAULT_SCHEDULE, options)


@dataclass(frozen=True)
class ContextAxis:
    """Split every sequence over `size` ranks."""

    size: int = 1
    strategy: ContextStrategy = "ring"

    def __str__(self) -> str:
        return _term(f"cp{self.size}", self.strategy, "ring", [])


def default_virtual(schedule: str) -> int:
    """The stages per rank that a schedule has when its text does not say."""
    return SCHEDULES[schedule].default_virtual if schedule in SCHEDULES else 1


def cube_root(number: int) -> int:
    """The largest q with q^3 <= number.

    >>> [cube_root(n) for n in (1, 7, 8, 26, 27, 1000)]
    [1, 1, 2, 2, 3, 10]
    """
    q = round(number ** (1 / 3))
    while q**3 > number:
        q -= 1
    while (q + 1) ** 3 <= number:
        q += 1
    return q
