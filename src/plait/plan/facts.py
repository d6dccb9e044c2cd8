"""The facts of every pipeline schedule and every data strategy: one row each.

Parser, rules, generators, cost, planner and exporters read these rows. A new schedule is its
generator in `parallel/pipeline/schedules/` and a row here. A new data strategy is its file in
`parallel/data/` and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

DataStrategy = Literal[
    "allreduce", "ring", "server", "async-server", "zero1", "zero2", "zero3", "local"
]
PipelineSchedule: TypeAlias = str
"""The name of a row of `SCHEDULES`; `Plan.check` refuses any other."""
DATA_STRATEGIES: Final[tuple[DataStrategy, ...]] = get_args(DataStrategy)
DEFAULT_SCHEDULE: Final[PipelineSchedule] = "1f1b"
PLAIN_SCHEDULE: Final[PipelineSchedule] = "gpipe"
"""The simplest schedule with several micro-batches: every forward, then every backward."""


class StagePlace(NamedTuple):
    """One stage of a pipeline: p ranks of v stages each, m micro-batches."""

    p: int
    m: int
    v: int
    stage: int
    rank: int

    @property
    def is_late(self) -> bool:
        """Whether the stage is beyond the first of each rank."""
        return self.stage >= self.p


@dataclass(frozen=True)
class ScheduleFacts:
    """The needs of a schedule, and the figures of its paper.

    `stages_per_rank`: None is any number from 2 on (the option `v`). `least_per_rank`: at least so
    many micro-batches for each rank. `asynchronous`: updates without a flush, on stale weights.
    `splits_backward`: input and weight gradients are separate actions. `bubble`: over that of 1F1B,
    (p-1)(F+B); None where one rank works at a time. `live`: micro-batches that a stage holds at the
    peak of its rank, of m or fewer. `searched`: the planner tries it where it fits, beside the
    default. `elsewhere`: other frameworks that have it. `torch_name`: its name in torch's
    pipelining. `torch_interleaves`: torch's schedule of that name needs two stages a rank.
    """

    stages_per_rank: int | None = 1
    least_per_rank: int = 0
    asynchronous: bool = False
    splits_backward: bool = False
    bubble: float | None = 1.0
    live: Callable[[StagePlace], int] = lambda at: at.p - at.rank
    searched: bool = False
    elsewhere: frozenset[str] = frozenset()
    torch_name: str | None = None
    torch_interleaves: bool = False

    @property
    def is_vee(self) -> bool:
        """Whether rank r holds stages r and 2p-1-r."""
        return self.stages_per_rank == 2

    @property
    def needs_virtual(self) -> bool:
        """Whether the option `v` says how many stages a rank holds."""
        return self.stages_per_rank is None

    @property
    def default_virtual(self) -> int:
        """The stages per rank that a text means without the option."""
        return self.stages_per_rank or 2

    @property
    def holds_all(self) -> bool:
        """Whether the activations of every micro-batch live at once."""
        return self.live is _every_micro_batch

    def least_micro_batches(self, num_ranks: int) -> int:
        """The fewest micro-batches on so many ranks."""
        return max(1, self.least_per_rank * num_ranks)


def _every_micro_batch(at: StagePlace) -> int:
    return at.m


def _interleaved(at: StagePlace) -> int:
    if not at.is_late or at.stage < at.p * (at.v - 1):
        return at.p
    return max(1, at.p - 2 * at.rank)


def _vee(at: StagePlace) -> int:
    return at.rank + 1 if at.is_late else 2 * at.p - at.rank


SCHEDULES: Final[Mapping[str, ScheduleFacts]] = MappingProxyType(
    {
        "naive": ScheduleFacts(bubble=None, live=lambda at: 1),
        "gpipe": ScheduleFacts(
            live=_every_micro_batch,
            elsewhere=frozenset({"nanotron", "torchtitan"}),
            torch_name="GPipe",
        ),
        "1f1b": ScheduleFacts(
            elsewhere=frozenset({"megatron-lm", "deepspeed", "nanotron", "torchtitan"}),
            torch_name="1F1B",
        ),
        "interleaved": ScheduleFacts(
            stages_per_rank=None,
            live=_interleaved,
            searched=True,
            elsewhere=frozenset({"megatron-lm", "torchtitan"}),
            torch_name="Interleaved1F1B",
        ),
        "zb-h1": ScheduleFacts(
            splits_backward=True,
            bubble=1 / 3,
            searched=True,
            torch_name="InterleavedZeroBubble",
            torch_interleaves=True,
        ),
        "zb-h2": ScheduleFacts(
            splits_backward=True, bubble=0.0, live=lambda at: 2 * at.p - 2 * at.rank - 1
        ),
        "zbv": ScheduleFacts(
            stages_per_rank=2,
            splits_backward=True,
            bubble=0.0,
            live=_vee,
            searched=True,
            elsewhere=frozenset({"torchtitan"}),
            torch_name="ZBVZeroBubble",
        ),
        "v-half": ScheduleFacts(
            stages_per_rank=2,
            splits_backward=True,
            bubble=0.5,
            live=lambda at: (at.p + 1) // 2 + 1,
            searched=True,
        ),
        "v-min": ScheduleFacts(
            stages_per_rank=2,
            splits_backward=True,
            bubble=2 / 3,
            live=lambda at: at.p // 3 + 2,
            searched=True,
        ),
        "dualpipev": ScheduleFacts(
            stages_per_rank=2,
            least_per_rank=2,
            splits_backward=True,
            bubble=1 / 3,
            live=_vee,
            searched=True,
            elsewhere=frozenset({"hai-llm", "torchtitan"}),
            torch_name="DualPipeV",
        ),
        "pipedream": ScheduleFacts(asynchronous=True),
        "2bw": ScheduleFacts(asynchronous=True, least_per_rank=1),
    }
)


PIPELINE_SCHEDULES: Final[tuple[PipelineSchedule, ...]] = tuple(SCHEDULES)
"""The names of all schedules, in the order of the grammar."""


def schedules_of(framework: str) -> tuple[PipelineSchedule, ...]:
    """The schedules that another framework has too, in the order of the grammar."""
    return tuple(name for name in PIPELINE_SCHEDULES if framework in SCHEDULES[name].elsewhere)


def broken_shape(name: str, facts: ScheduleFacts, sizes: tuple[int, int, int]) -> str | None:
    """Why a schedule has no such shape, or None; `sizes` is (ranks, stages a rank, micro-batches).

    The rules of plans and the generators both ask here, so they cannot disagree.
    """
    p, v, m = sizes
    for what, number in (("ranks", p), ("stages a rank", v), ("micro-batches", m)):
        if number < 1:
            return f"{name}: {number} {what}; at least 1 is needed"
    if facts.needs_virtual and v < 2:
        return f"{name} needs v2 or more; say {name},v2, or take 1f1b with one"
    if facts.stages_per_rank not in (None, v):
        fixed = facts.stages_per_rank
        return (
            f"{name} puts {fixed} stage(s) on a rank, not {v}; leave v out, or take interleaved,v2"
        )
    least = facts.least_micro_batches(p)
    if m < least:
        return f"{name} on {p} ranks needs at least {least} micro-batches, got {m}; write mb{least}"
    return None


@dataclass(frozen=True)
class StrategyFacts:
    """The tensors that a data strategy shards, and the options and axes that it goes with.

    `zero_stage` 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too.
    `options` are those of its text. `synchronous`: its ranks step together. `keeps_versions`: whole
    weights, of which an asynchronous schedule may keep several. `through_stages`: it runs on the
    stages of a pipeline.
    """

    zero_stage: int = 0
    options: frozenset[str] = frozenset()
    synchronous: bool = True
    keeps_versions: bool = False
    through_stages: bool = True

    @property
    def sums_in_order(self) -> bool:
        """Whether its ranks can add their gradients in one fixed tree."""
        return self.synchronous and self.through_stages

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank holds its part of the optimizer's state alone."""
        return self.zero_stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps its part of the gradients alone."""
        return self.zero_stage >= 2

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds its part of the parameters alone."""
        return self.zero_stage >= 3

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer sees flat shards, and must update each element by itself."""
        return self.shards_optimizer


_SHARDED: Final = frozenset({"replicate", "offload"})

STRATEGIES: Final[Mapping[str, StrategyFacts]] = MappingProxyType(
    {
        "allreduce": StrategyFacts(keeps_versions=True),
        "ring": StrategyFacts(keeps_versions=True),
        "server": StrategyFacts(through_stages=False),
        "async-server": StrategyFacts(options=frozenset({"stale"}), synchronous=False),
        "zero1": StrategyFacts(1, _SHARDED),
        "zero2": StrategyFacts(2, _SHARDED),
        "zero3": StrategyFacts(3, _SHARDED),
        "local": StrategyFacts(options=frozenset({"every"}), synchronous=False),
    }
)


ZERO: Final[Mapping[int, DataStrategy]] = MappingProxyType(
    {STRATEGIES[name].zero_stage: name for name in DATA_STRATEGIES if STRATEGIES[name].zero_stage}
)
"""The data strategy of each ZeRO stage: 1, 2 and 3."""


def strategies_with(option: str) -> tuple[DataStrategy, ...]:
    """The data strategies that have an option, in the order of the grammar."""
    return tuple(name for name in DATA_STRATEGIES if option in STRATEGIES[name].options)
