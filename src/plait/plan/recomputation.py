"""The recomputation of each block, which `remat:auto` chooses, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from plait.plan.axes import BlockRemat


def remat_text(words: Sequence[BlockRemat]) -> str:
    """Runs of equal words, with blocks numbered from 0 as modules of a list are.

    >>> remat_text(["full", "full", "none"])
    'blocks 0 to 1 full, 2 none'
    >>> remat_text(["none", "none"])
    'all blocks none'
    """
    runs = []
    start = 0
    for word, same in groupby(words):
        end = start + len(list(same))
        runs.append(f"{start}{f' to {end - 1}' if end - start > 1 else ''} {word}")
        start = end
    return f"all blocks {words[0]}" if len(runs) == 1 else f"blocks {', '.join(runs)}"
