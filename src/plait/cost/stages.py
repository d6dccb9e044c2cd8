"""Which blocks each pipeline stage holds.

The blocks at the ends (embedding, head) count as a layer each when layers are dealt out, as published runs do: the ends get the
smaller share when the layers do not divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from plait.cost.operations import Block, Model


@dataclass(frozen=True)
class Stage:
    """Runs of blocks, in order, and where the stage stands."""

    runs: tuple[tuple[Block, int], ...]
    first: bool = False
    last: bool = False

    @property
    def parameters(self) -> int:
        """The weights of the stage, undivided."""
        return sum(block.parameters * count for block, count in self.runs)


@lru_cache(maxsize=4096)
def split_model(model: Model, num_stages: int) -> tuple[Stage, ...]:
    """`num_stages` stages of nearly equal numbers of layers, embedding in the first and head in the last."""
    blocks = list(model.blocks())
    if num_stages == 1:
        return (Stage(model.runs, True, True),)
    inner = len(blocks) - 2
    shares = layer_shares(inner, num_stages)
    stages, start = [], 0
    for index, share in enumerate(shares):
        size = share + (index == 0) + (index == num_stages - 1)
        stages.append(Stage(_runs(blocks[start : start + size]), index == 0, index == num_stages - 1))
        start += size
    return tuple(stages)


def layer_shares(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage; what does not divide goes to the stages between the ends first.

    >>> layer_shares(22, 8)
    (2, 3, 3, 3, 3, 3, 3, 2)
    """
    base, rest = divmod(num_layers, num_stages)
    shares = [base] * num_stages
    order = [*range(1, num_stages - 1), 0, num_stages - 1] if num_stages > 2 else [0, 1][:num_stages]
    for index in order[:rest]:
        shares[index] += 1
    return tuple(shares)


def _runs(blocks: list[Block]) -> tuple[tuple[Block, int], ...]:
    runs: list[tuple[Block, int]] = []
    for block in blocks:
        if runs and runs[-1][0] is block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)
