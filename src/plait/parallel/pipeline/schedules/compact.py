"""Building blocks: one rule that makes the zero-bubble and the controllable-memory schedules.

Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3. A schedule
is the path of one micro-batch (its *building block*), repeated at the interval of a rank's work.
The time of a micro-batch on a rank is the memory that the rank needs. So memory is chosen by
choosing the path. The block fixes the order of forwards and input gradients. Weight gradients have
no dependants and fill idle time (Qi et al., Zero Bubble, arXiv 2401.10241, section 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from operator import itemgetter

from plait.parallel.pipeline.actions import (
    Action,
    Kind,
    forward,
    input_grad,
    straight,
    vee,
    weight_grad,
)
from plait.parallel.pipeline.clock import needs


@dataclass(frozen=True)
class BuildingBlock:
    """When the passes of micro-batch 0 start on each stage, in units of one pass; micro-batch j
    follows j intervals later.
    """

    placement: tuple[int, ...]
    forwards: tuple[int, ...]
    input_grads: tuple[int, ...]

    @cached_property
    def num_ranks(self) -> int:
        """Ranks."""
        return max(self.placement) + 1

    @cached_property
    def interval(self) -> int:
        """The work of a micro-batch on one rank: F, I and W for each of its stages."""
        return 3 * len(self.placement) // self.num_ranks

    def collides(self) -> bool:
        """Whether two passes of a rank fall on the same unit of the repeated pattern."""
        for rank in range(self.num_ranks):
            mine = [stage for stage, holder in enumerate(self.placement) if holder == rank]
            starts = [
                times[stage] % self.interval
                for times in (self.forwards, self.input_grads)
                for stage in mine
            ]
            if len(set(starts)) < len(starts):
                return True
        return False


def straight_block(num_ranks: int, down: int, up: int) -> BuildingBlock:
    """One stage a rank: the forward moves a rank every `down` units, the input gradient every
    `up`.
    """
    last = down * (num_ranks - 1)
    forwards = tuple(down * stage for stage in range(num_ranks))
    return BuildingBlock(
        straight(num_ranks),
        forwards,
        tuple(last + 1 + up * (num_ranks - 1 - stage) for stage in range(num_ranks)),
    )


def vee_block(num_ranks: int, first: tuple[int, int], second: tuple[int, int]) -> BuildingBlock:
    """Two stages a rank, on the way down (`first`) and up (`second`); each is (units a rank of
    forward, of input gradient).

    The three turns of the path are at the last rank, the loss, and the last rank. They take as few
    units as let the repeated pattern fit.
    """
    best = sorted(product(range(1, 7), repeat=3), key=lambda turns: (sum(turns), turns))
    blocks = (_vee_block(num_ranks, first, second, turns) for turns in best)
    return next(
        (block for block in blocks if not block.collides()),
        _vee_block(num_ranks, first, second, (1, 1, 1)),
    )


def _vee_block(
    p: int, first: tuple[int, int], second: tuple[int, int], turns: Sequence[int]
) -> BuildingBlock:
    hops = [first[0]] * (p - 1) + [turns[0]] + [second[0]] * (p - 1)
    hops += [turns[1]] + [second[1]] * (p - 1) + [turns[2]] + [first[1]] * (p - 1)
    times = [sum(hops[:index]) for index in range(4 * p)]
    return BuildingBlock(vee(p), tuple(times[: 2 * p]), tuple(reversed(times[2 * p :])))


@dataclass
class _Progress:
    """The passes done of each stage.

    A stage takes its micro-batches in order, so two counts decide which pass may run.
    """

    forwarded: list[int]
    returned: list[int]

    def is_ready(self, kind: Kind, stage: int) -> bool:
        """Whether what the stage's next pass of this kind needs is there (see
        `plait.parallel.pipeline.clock.needs`).
        """
        forwarded = self.forwarded
        returned = self.returned
        count = forwarded[stage] if kind is Kind.FORWARD else returned[stage]
        for need, at in needs(kind, stage, len(returned)):
            if (forwarded if need is Kind.FORWARD else returned)[at] <= count:
                return False
        return True


@dataclass
class _RankState:
    """The passes that one rank has still to do, and the activations that it holds."""

    block: BuildingBlock
    stages: tuple[int, ...]
    num_micro_batches: int
    limit: int
    eager: bool
    progress: _Progress
    held: deque[int] = field(default_factory=deque)
    """Stages whose weight gradients may run."""
    num_live: int = 0
    done: list[Action] = field(default_factory=list)
    weighed: dict[int, int] = field(default_factory=dict)  # stage -> weight gradients done
    next_passes: list[tuple[Kind, int]] | None = None
    """The result of `passes`, until one of them is taken."""

    def passes(self) -> list[tuple[Kind, int]]:
        """The next forward and input gradient of each stage, in the order of the block."""
        if self.next_passes is None:
            timed: list[tuple[int, Kind, int]] = []
            block = self.block
            for stage in self.stages:
                returned = self.progress.returned[stage]
                if returned < self.num_micro_batches:
                    start = block.input_grads[stage] + returned * block.interval
                    timed.append((start, Kind.INPUT_GRAD, stage))
                forwarded = self.progress.forwarded[stage]
                if forwarded < self.num_micro_batches:
                    start = block.forwards[stage] + forwarded * block.interval
                    timed.append((start, Kind.FORWARD, stage))
            timed.sort(key=itemgetter(0))
            self.next_passes = [(kind, stage) for _, kind, stage in timed]
        return self.next_passes

    def choose(self) -> tuple[Kind, int] | None:
        """The next pass of the block, else a weight gradient, else a later pass that is ready.
        Forwards come only if eager.
        """
        passes = self.passes()
        is_ready = self.progress.is_ready
        first = passes[0] if passes and is_ready(*passes[0]) else None
        full = self.num_live >= self.limit
        if first is not None and not (first[0] is Kind.FORWARD and full and self.held):
            return first
        if self.held:
            return Kind.WEIGHT_GRAD, self.held[0]
        room = (
            self.eager and self.num_live < self.limit - 1
        )  # one place stays free for the pass whose turn it is
        return next(
            (each for each in passes if (each[0] is Kind.INPUT_GRAD or room) and is_ready(*each)),
            None,
        )

    def take(self, kind: Kind, stage: int) -> None:
        """Account for one unit of work."""
        if kind is Kind.WEIGHT_GRAD:
            self.held.popleft()
            self.num_live -= 1
            self.done.append(weight_grad(stage, self.weighed.get(stage, 0)))
            self.weighed[stage] = self.weighed.get(stage, 0) + 1
            return
        self.next_passes = None
        if kind is Kind.FORWARD:
            self.done.append(forward(stage, self.progress.forwarded[stage]))
            self.progress.forwarded[stage] += 1
            self.num_live += 1
        else:
            self.done.append(input_grad(stage, self.progress.returned[stage]))
            self.progress.returned[stage] += 1
            self.held.append(stage)


def compact(
    block: BuildingBlock, num_micro_batches: int, limit: int, eager: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """The lists that follow from a block when idle units are squeezed out.

    At most `limit` activations (of one stage and micro-batch, from forward to weight gradient) live
    on a rank. `eager` pulls forwards into idle units while there is room.
    """
    count = len(block.placement)
    progress = _Progress([0] * count, [0] * count)
    stages_of: list[list[int]] = [[] for _ in range(block.num_ranks)]
    for stage, holder in enumerate(block.placement):
        stages_of[holder].append(stage)
    ranks = [
        _RankState(block, tuple(stages), num_micro_batches, limit, eager, progress)
        for stages in stages_of
    ]
    left = 3 * num_micro_batches * count
    while left:
        chosen = [rank.choose() for rank in ranks]
        for rank, each in zip(ranks, chosen, strict=True):
            if each is not None:
                rank.take(*each)
                left -= 1
    return tuple(tuple(rank.done) for rank in ranks)
