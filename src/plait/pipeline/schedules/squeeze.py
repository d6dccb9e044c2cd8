"""Building blocks: one rule that makes the zero-bubble and the controllable-memory schedules.

Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3: a schedule is the path of one
micro-batch (its *building block*), repeated at the interval of a rank's work. How long a micro-batch stays on a rank is
how much memory the rank needs, so memory is chosen by choosing the path. The block fixes the order of forwards and input
gradients; weight gradients wait for nobody and fill what would be idle (Qi et al., Zero Bubble, arXiv 2401.10241, section 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from plait.pipeline.actions import Action, Kind, forward, input_grad, straight, vee, weight_grad
from plait.pipeline.clock import producers


@dataclass(frozen=True)
class Block:
    """When the passes of micro-batch 0 start on each stage, in units of one pass; micro-batch j follows j intervals later."""

    placement: tuple[int, ...]
    forwards: tuple[int, ...]
    input_grads: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return max(self.placement) + 1

    @property
    def interval(self) -> int:
        """The work of a micro-batch on one rank: F, I and W for each of its stages."""
        return 3 * len(self.placement) // self.num_ranks

    def collides(self) -> bool:
        """Whether two passes of a rank fall on the same unit of the repeated pattern."""
        for rank in range(self.num_ranks):
            mine = [stage for stage, holder in enumerate(self.placement) if holder == rank]
            starts = [times[stage] % self.interval for times in (self.forwards, self.input_grads) for stage in mine]
            if len(set(starts)) < len(starts):
                return True
        return False


def straight_block(num_ranks: int, down: int, up: int) -> Block:
    """One stage a rank: the forward moves a rank every `down` units, the input gradient every `up`."""
    last = down * (num_ranks - 1)
    forwards = tuple(down * stage for stage in range(num_ranks))
    return Block(straight(num_ranks), forwards, tuple(last + 1 + up * (num_ranks - 1 - stage) for stage in range(num_ranks)))


def vee_block(num_ranks: int, first: tuple[int, int], second: tuple[int, int]) -> Block:
    """Two stages a rank, on the way down (`first`) and up (`second`); each is (units a rank of forward, of input gradient).

    The three turns of the path (last rank, loss, last rank) take as few units as let the repeated pattern fit.
    """
    best = sorted(product(range(1, 7), repeat=3), key=lambda turns: (sum(turns), turns))
    blocks = (_vee_block(num_ranks, first, second, turns) for turns in best)
    return next((block for block in blocks if not block.collides()), _vee_block(num_ranks, first, second, (1, 1, 1)))


def _vee_block(p: int, first: tuple[int, int], second: tuple[int, int], turns: Sequence[int]) -> Block:
    hops = [first[0]] * (p - 1) + [turns[0]] + [second[0]] * (p - 1)
    hops += [turns[1]] + [second[1]] * (p - 1) + [turns[2]] + [first[1]] * (p - 1)
    times = [sum(hops[:index]) for index in range(4 * p)]
    return Block(vee(p), tuple(times[: 2 * p]), tuple(reversed(times[2 * p :])))


@dataclass
class _Rank:
    """What one rank has still to do, and what it holds."""

    block: Block
    stages: tuple[int, ...]
    num_micro_batches: int
    limit: int
    eager: bool
    forwarded: dict[int, int] = field(default_factory=dict)  # stage -> forwards done
    returned: dict[int, int] = field(default_factory=dict)  # stage -> input gradients done
    held: deque[Action] = field(default_factory=deque)  # weight gradients that may run
    num_live: int = 0
    done: list[Action] = field(default_factory=list)

    def passes(self) -> list[Action]:
        """The next forward and input gradient of each stage, in the order of the block."""
        timed: list[tuple[int, Action]] = []
        for stage in self.stages:
            for count, times, kind in (
                (self.returned.get(stage, 0), self.block.input_grads, input_grad),
                (self.forwarded.get(stage, 0), self.block.forwards, forward),
            ):
                if count < self.num_micro_batches:
                    timed.append((times[stage] + count * self.block.interval, kind(stage, count)))
        return [action for _, action in sorted(timed, key=lambda pair: pair[0])]

    def choose(self, done: set[Action]) -> Action | None:
        """The next pass of the block; else a weight gradient; else a later pass that is ready (a forward only if eager)."""
        passes = self.passes()
        ready = [action for action in passes if all(need in done for need in producers(action, len(self.block.placement)))]
        full = self.num_live >= self.limit
        if ready and ready[0] == passes[0] and not (ready[0].kind is Kind.FORWARD and full and self.held):
            return ready[0]
        if self.held:
            return self.held[0]
        room = self.eager and self.num_live < self.limit - 1  # one place stays free for the pass whose turn it is
        return next((action for action in ready if action.kind is Kind.INPUT_GRAD or room), None)

    def take(self, action: Action) -> None:
        """Account for one unit of work."""
        self.done.append(action)
        stage = action.stage
        if action.kind is Kind.FORWARD:
            self.forwarded[stage] = self.forwarded.get(stage, 0) + 1
            self.num_live += 1
        elif action.kind is Kind.INPUT_GRAD:
            self.held.append(weight_grad(stage, self.returned.get(stage, 0)))
            self.returned[stage] = self.returned.get(stage, 0) + 1
        else:
            self.held.popleft()
            self.num_live -= 1


def squeeze(block: Block, num_micro_batches: int, limit: int, eager: bool = False) -> tuple[tuple[Action, ...], ...]:
    """The lists that follow from a block when idle units are squeezed out.

    At most `limit` activations (of one stage and micro-batch, from forward to weight gradient) live on a rank. `eager`
    pulls forwards into idle units while there is room.
    """
    ranks = [
        _Rank(block, tuple(s for s, holder in enumerate(block.placement) if holder == rank), num_micro_batches, limit, eager)
        for rank in range(block.num_ranks)
    ]
    done: set[Action] = set()
    while len(done) < 3 * num_micro_batches * len(block.placement):
        chosen = [rank.choose(done) for rank in ranks]
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.take(action)
                done.add(action)
    return tuple(tuple(rank.done) for rank in ranks)
