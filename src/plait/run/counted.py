"""The word for what the steps of a run count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.run.hooks import RunStart


def batch_of(start: RunStart) -> int:
    """The samples of a global batch; 0 where the loader does not say."""
    return int(getattr(start.loader, "global_batch", 0))


def counted_unit(tokens: Sequence[float], global_batch: int) -> str:
    """The unit of the `tokens` of steps, as `plait estimate` names it.

    Without sequences of integers a step counts its samples. Under a plan that tells several steps
    at once the mean is that of a batch.
    """
    if tokens and sum(tokens) <= global_batch * len(tokens):
        return "samples"
    return "tokens"
