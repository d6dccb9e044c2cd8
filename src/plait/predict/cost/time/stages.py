"""Which blocks each pipeline stage holds.

Balanced by the cost of each block, so that a stage with a large head holds fewer layers. Frameworks
whose stages must be equal deal them out evenly instead; embedding and head then count as a layer
each. Others fill one stage after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from plait.errors import PlanError
from plait.plan.axes import BlockRemat, Remat
from plait.predict.cost.cached_hash import caches_hash
from plait.predict.cost.model.operations import Block, Model
from plait.predict.cost.runtime import StageCut


@caches_hash
@dataclass(frozen=True)
class StageBlocks:
    """Runs of blocks, in order, and where the stage stands."""

    runs: tuple[tuple[Block, int], ...]
    first: bool = False
    last: bool = False
    remat: tuple[BlockRemat, ...] = ()
    """Recomputation of each run, where a budget chose it; none under a word for all blocks."""
    kept: tuple[int, ...] = ()
    """Blocks of each run that ZeRO-3 keeps whole once they are gathered; by default none of any."""

    def recomputed(self, remat: Remat) -> Iterator[tuple[Block, int, BlockRemat]]:
        """Each run with its own recomputation; `remat` is the plan's.

        Raises `PlanError` under `auto` before the words are chosen.
        """
        if remat != "auto":
            for block, count in self.runs:
                yield block, count, remat
            return
        if not self.remat:
            raise PlanError(
                "remat:auto is chosen for one whole plan, and these stages have no choice yet; "
                "take remat:none, selective or full"
            )
        for (block, count), word in zip(self.runs, self.remat, strict=True):
            yield block, count, word

    def kept_runs(self) -> Iterator[tuple[Block, int, int]]:
        """Each run with the number of its blocks that stay whole."""
        for (block, count), kept in zip(self.runs, self.kept or (0,) * len(self.runs), strict=True):
            yield block, count, kept

    @property
    def parameters(self) -> int:
        """The weights of the stage, undivided."""
        return sum(block.parameters * count for block, count in self.runs)


@lru_cache(maxsize=4096)
def split_model(
    model: Model,
    num_stages: int,
    cut: StageCut = "cost",
    counts: tuple[int, ...] = (),
) -> tuple[StageBlocks, ...]:
    """`num_stages` stages in order, cut as `cut` says. `counts` are the layers of each stage, or
    all its blocks.

    Raises `PlanError` when there are more stages than layers.
    """
    if num_stages == 1:
        return (_same(StageBlocks(model.runs, True, True)),)
    blocks = list(model.blocks())
    inner = len(blocks) - 2
    if len(blocks) < num_stages:
        raise PlanError(
            f"{num_stages} pipeline stages need {num_stages} blocks or more, and {model.name} "
            f"has {len(blocks)}"
        )
    if counts:
        ends = _counted_ends(counts, len(blocks), model)
    elif cut == "cost":
        ends = _balanced_ends([block.flops(model.seq_len) for block in blocks], num_stages)
    elif cut == "filled":
        ends = _filled_ends([block.flops(0) for block in blocks], num_stages)
    elif inner % num_stages and len(blocks) % num_stages == 0:
        ends = [len(blocks) // num_stages * (index + 1) for index in range(num_stages)]
    else:
        sizes = list(layer_shares(inner, num_stages))
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] + 1
        ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    last = num_stages - 1
    return tuple(
        _same(StageBlocks(_runs(blocks[start:end]), index == 0, index == last))
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


@lru_cache(maxsize=65536)
def _same(stage: StageBlocks) -> StageBlocks:
    """One object for all equal stages: what is the same object is found in a cache at once."""
    return stage


def _counted_ends(counts: tuple[int, ...], num_blocks: int, model: Model) -> list[int]:
    """The end of each stage of so many layers. The ends of the model go with the outer stages,
    where the counts leave them out.
    """
    sizes = list(counts)
    if sum(sizes) == num_blocks - 2:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] + 1
    if sum(sizes) != num_blocks or min(counts) < 1:
        raise PlanError(
            f"plan.counts {list(counts)} sum to {sum(counts)}; {model.name} has "
            f"{num_blocks - 2} layers, and {num_blocks} with embedding and head, at least 1 a stage"
        )
    return list(accumulate(sizes))


def layer_shares(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage; what does not divide goes to the stages between the ends first.

    >>> layer_shares(22, 8)
    (2, 3, 3, 3, 3, 3, 3, 2)
    """
    base, rest = divmod(num_layers, num_stages)
    shares = [base] * num_stages
    order = (
        [*range(1, num_stages - 1), 0, num_stages - 1] if num_stages > 2 else [0, 1][:num_stages]
    )
    for index in order[:rest]:
        shares[index] += 1
    return tuple(shares)


def _balanced_ends(costs: list[float], num_stages: int) -> list[int]:
    """The end of each stage, so that the dearest is as cheap as possible, and the others near the
    mean.
    """
    capacity = _least_capacity(costs, num_stages)
    needed = _stages_needed(costs, capacity)
    mean = sum(costs) / num_stages
    ends: list[int] = []
    start = 0
    total = 0.0
    for index in range(num_stages - 1):
        left = num_stages - 1 - index
        end = start + 1
        stage = costs[start]
        while len(costs) - end > left and (
            needed[end] > left
            or (
                stage + costs[end] <= capacity
                and abs(total + stage + costs[end] - mean * (index + 1))
                <= abs(total + stage - mean * (index + 1))
            )
        ):
            stage += costs[end]
            end += 1
        total += stage
        ends.append(end)
        start = end
    return [*ends, len(costs)]


def _filled_ends(products: list[float], num_stages: int) -> list[int]:
    """The end of each stage, where a stage takes blocks until their products pass its share.

    The block that passes is included (`build_model` of nanotron's `models/base.py`). Each stage has
    a block at least, where nanotron may leave its last ones none.
    """
    whole = sum(products)
    ends: list[int] = []
    total = 0.0
    for end, own in enumerate(products, start=1):
        total += own
        stages_left = num_stages - 1 - len(ends)
        passed = total * num_stages > whole * (len(ends) + 1)
        if stages_left and (passed or len(products) - end == stages_left):
            ends.append(end)
    return [*ends, len(products)]


def _least_capacity(costs: list[float], num_stages: int) -> float:
    low = max(*costs, sum(costs) / num_stages)
    high = sum(costs)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if _stages_needed(costs, middle)[0] <= num_stages else (middle, high)
        )
    return high * (1 + 1e-9)


def _stages_needed(costs: list[float], capacity: float) -> list[int]:
    """For each block, the stages that the blocks from it to the end need when none may exceed
    `capacity`.
    """
    count = len(costs)
    needed = [0] * (count + 1)
    end = count
    total = 0.0
    for start in range(count - 1, -1, -1):
        total += costs[start]
        while total > capacity and end > start + 1:
            end -= 1
            total -= costs[end]
        needed[start] = needed[end] + 1
    return needed


def _runs(blocks: list[Block]) -> tuple[tuple[Block, int], ...]:
    runs: list[tuple[Block, int]] = []
    for block in blocks:
        if runs and runs[-1][0] is block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)
