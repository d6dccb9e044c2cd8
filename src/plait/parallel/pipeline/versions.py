"""Weight versions of one stage under an asynchronous schedule.

A backward finds the weights that its forward saw. An update never writes into weights that are
still wanted: it makes the next version in other memory. PipeDream's forward takes the newest
version of its stage (Narayanan et al., arXiv 1806.03377, section 3.3, weight stashing). 2BW's takes
the one that is `delay` updates before its own (arXiv 2006.09503, section 3.1).
`weights.stage_weights` says the same on paper.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class FlatWeights(Protocol):
    """Whole weights in flat buffers (padded_numel,), one a bucket, which can be put elsewhere."""

    @property
    def flats(self) -> list[Tensor]:
        """The buffers (padded_numel,) that the next update changes."""

    def renew(self, memory: list[Tensor] | None) -> None:
        """Go on in other flat buffers with the same values; the old ones are left alone. `memory`,
        if given, has them, (padded_numel,) each.
        """

    def show(self, flats: list[Tensor]) -> None:
        """Let the modules see these buffers, of the shapes of `flats`."""


class WeightVersions:
    """The versions that live. `num_micro_batches` go into one update.

    A `delay` of d updates is 2BW's (Narayanan et al., arXiv 2006.09503, section 3.1). None is
    PipeDream's newest version (arXiv 1806.03377, section 3.3).
    """

    def __init__(self, weights: FlatWeights, num_micro_batches: int, delay: int | None) -> None:
        self._weights = weights
        self._per_update = num_micro_batches
        self._delay = delay
        self.newest = 0
        self.seen: dict[int, int] = {}  # micro-batch under way -> its version
        self.kept: dict[int, list[Tensor]] = {0: weights.flats}
        self.peak = 1
        self._free: list[list[Tensor]] = []

    def forward(self, micro_batch: int) -> int:
        """A forward begins; its version."""
        version = self.newest
        if self._delay is not None:
            version = max(0, micro_batch // self._per_update - self._delay)
        self.seen[micro_batch] = version
        self._weights.show(self.kept[version])
        return version

    def backward(self, micro_batch: int) -> None:
        """A backward of a micro-batch begins."""
        self._weights.show(self.kept[self.seen[micro_batch]])

    def done(self, micro_batch: int) -> None:
        """The backward of a micro-batch has ended."""
        del self.seen[micro_batch]
        self._release()

    def before_update(self) -> None:
        """The optimizer is about to make the next version."""
        if self.newest in self.seen.values() or self._delay:
            self._weights.renew(self._free.pop() if self._free else None)

    def after_update(self) -> None:
        """The optimizer has made the next version."""
        self.newest += 1
        self.kept[self.newest] = self._weights.flats
        self._release()
        self.peak = max(self.peak, len(self.kept))
        self.show_newest()

    def show_newest(self) -> None:
        """Let the modules see the weights that the last update made."""
        self._weights.show(self.kept[self.newest])

    def restart(self) -> None:
        """A new stream begins, with the newest weights as version 0."""
        newest = self.kept[self.newest]
        self._free += [
            flats
            for version, flats in self.kept.items()
            if version != self.newest and flats is not newest
        ]
        self.newest = 0
        self.seen = {}
        self.kept = {0: newest}

    @property
    def stashed(self) -> list[Tensor]:
        """The buffers (padded_numel,) of older versions, and those that wait for the next."""
        older = [flats for version, flats in self.kept.items() if version != self.newest]
        return [flat for flats in older + self._free for flat in flats]

    def _release(self) -> None:
        oldest = self.newest - (self._delay or 0)
        for version in [v for v in self.kept if v < oldest and v not in self.seen.values()]:
            flats = self.kept.pop(version)
            if all(flats is not other for other in self.kept.values()):
                self._free.append(flats)
