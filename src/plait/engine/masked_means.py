"""A warning where a loss is no mean over samples, and the plan weighs it by samples.

A loss that is one number means "the mean over the samples". The mean of `cross_entropy` is over the
targets that are not masked. The two differ as soon as samples have different numbers of these. With
a weight for each class it is over the weights of the targets, which differ from class to class.
The same holds of a mask that the loss multiplies or selects by. Under `cpN` parts of one sequence
have a loss each, and differ even where all samples have equal masks.
A loss that takes positions together takes those of its part alone.
A sum over samples shrinks with the parts of a batch, as its gradient does under DDP. A contrastive
loss has fewer pairs there.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from plait.batch_trees import leaves_of
from plait.engine.loss import LossFunction
from plait.engine.mixed_losses import MixedSamples
from plait.engine.mixed_positions import MixedPositions
from plait.engine.neighbours import Neighbours
from plait.engine.sample_sums import SampleSums
from plait.engine.target_means import TargetMeans
from plait.engine.uneven_means import UnevenMeans
from plait.models.losses import IGNORE
from plait.torch_internals import is_recorded, without_compiling
from plait.values import PyTree

MINUS_ONE = -1
"""The mask of some models that make the loss, in targets that are sequences of classes.

Of a loss that reads the targets, its own functions tell which classes it ignores.
"""
LOOKS = 4
"""Micro-batches of which the targets are read; each reading waits for the device."""


AGAIN = 8
"""How often a loss of other operations is looked for, behind the first looks."""
NEXT = 8
"""Calls in which it is looked for."""
OPERATIONS = 16
"""How many of its last operations tell a loss from another one."""


class MaskedMeanCheck:
    """A loss function that looks at its first targets, and warns once.

    A compiled loss is looked at as it was written, and its kernels follow.

    Attributes:
        parts: the slices of a batch that have a loss each, over all ranks.
        sequences: the parts of each sequence that have a loss each.
    """

    def __init__(self, function: LossFunction, slices: int, sequences: int = 1) -> None:
        self.parts = slices * sequences
        self.sequences = sequences
        self._cuts_samples = slices > 1
        self._function = function
        self._looks = LOOKS
        self._again = AGAIN
        self._known: set[tuple[str, ...]] = set()
        self._wanted: tuple[str, ...] = ()
        self._is_masked = False
        self._ignored = {IGNORE}
        self._counts: dict[tuple[str, int], set[int]] = {}

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        if not self._looks or is_recorded():
            return self._noted(self._function(output, targets))
        mixed = MixedSamples(output, targets)
        beside = Neighbours(output, targets)
        sums = SampleSums(output, targets)
        over_targets = TargetMeans(output, targets, sums)
        uneven = UnevenMeans(output, targets, cuts_sequences=self.sequences > 1)
        along = MixedPositions(output, targets) if self.sequences > 1 else nullcontext()
        with without_compiling(), uneven as means, over_targets, sums, mixed, beside, along:
            loss = self._function(output, targets)
        self._looks -= 1
        self._looked_at(loss)
        self._ignored |= {mean.ignored for mean in over_targets.means}
        if not over_targets.reads_targets and _has_minus_ones(targets):
            self._ignored.add(MINUS_ONE)
        if self._cuts_samples and (found := mixed.found(loss) or beside.found(loss)):
            self._end()
            self._warn_of_mixed_samples(found)
        elif isinstance(along, MixedPositions) and (found := along.found(loss)):
            self._end()
            self._warn_of_mixed_positions(found)
        elif isinstance(loss, tuple) and isinstance(along, MixedPositions):
            if _counts_samples(loss, sums, means, along):
                self._end()
                self._warn_of_a_count_of_samples()
        elif isinstance(loss, Tensor):
            if sums.has(loss):
                self._end()
                self._warn_of_a_sum()
            elif means.of_classes:
                self._end()
                self._warn_of_weights()
            elif means.of_places:
                self._end()
                self._warn_of_places()
            else:
                self._look_at_means(over_targets)
                if self.sequences > 1 or not over_targets.follows(loss):
                    self._look(targets)
        return loss

    def _noted(self, loss: PyTree) -> PyTree:
        """A loss; where it is made of other operations than before, the next ones are looked at.

        A term may come in after some steps, and losses may take turns.
        """
        if self._again and not is_recorded() and (made_by := _operations(loss)) not in self._known:
            self._known.add(made_by)
            self._wanted = made_by
            self._again -= 1
            self._looks = NEXT
        return loss

    def _looked_at(self, loss: PyTree) -> None:
        """End the looks at the next losses with one that is like the loss that they are for."""
        made_by = _operations(loss)
        self._known.add(made_by)
        if self._wanted and made_by == self._wanted:
            self._looks = 1
            self._wanted = ()

    def _end(self) -> None:
        """The loss has been told of: look no more."""
        self._looks = 0
        self._again = 0

    def _look_at_means(self, over_targets: TargetMeans) -> None:
        for place, mean in enumerate(over_targets.means):
            marks = {mean.ignored} if mean.is_masked else set()
            self._judge(("mean", place), mean.counts, marks, mean.ignored)

    def _look(self, targets: PyTree) -> None:
        leaves = [leaf for leaf in leaves_of(targets) if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
        marks = {mark for leaf in leaves for mark in self._marks(leaf)}
        for place, counts in targets_of_samples(targets, self._ignored):
            self._judge(("leaf", place), set(counts.tolist()), marks, min(marks or self._ignored))

    def _judge(self, of: tuple[str, int], counts: set[int], marks: set[int], mark: int) -> None:
        """Warn where the numbers of unmasked targets of a mean or a leaf differ."""
        if not self._looks:
            return
        self._is_masked = self._is_masked or bool(marks)
        known = self._counts.setdefault(of, set())
        known.update(counts)
        if marks and self.sequences > 1:
            self._end()
            self._warn("the parts of a sequence may have unequal numbers of", mark)
        elif self._is_masked and len(known) > 1:
            self._end()
            self._warn(f"samples have {min(known)} to {max(known)}", mark)

    def _marks(self, leaf: Tensor) -> set[int]:
        """The numbers that mask targets of a leaf."""
        return {mark for mark in self._ignored if bool((leaf == mark).any())}

    def _warn(self, numbers: str, mark: int) -> None:
        named = "" if mark == IGNORE else f", ignore_index={mark}"
        warnings.warn(
            f"the loss returns one number, which counts as the mean over samples, and {numbers} "
            f"targets that are not {mark}; a mean over targets is then "
            f"weighed wrongly over the {self.parts} parts of a batch: return (sum, count) instead, "
            f"such as cross_entropy(...{named}, reduction='sum') and (targets != {mark}).sum()",
            stacklevel=2,
        )

    def _warn_of_weights(self) -> None:
        warnings.warn(
            "the loss returns one number, which counts as the mean over samples, and it is a mean "
            "over the weights of classes (cross_entropy or nll_loss with weight=...); it is then "
            f"weighed wrongly over the {self.parts} parts of a batch: return (sum, count) instead, "
            "such as cross_entropy(..., weight=weight, reduction='sum') and weight[targets].sum()",
            stacklevel=2,
        )

    def _warn_of_places(self) -> None:
        warnings.warn(
            "the loss returns one number, which counts as the mean over samples, and it is a mean "
            "over a mask or over weights, whose sums differ from sample to sample; it is then "
            f"weighed wrongly over the {self.parts} parts of a batch: return (sum, count) instead, "
            "such as (losses * mask).sum() and mask.sum()",
            stacklevel=2,
        )

    def _warn_of_mixed_samples(self, name: str) -> None:
        warnings.warn(
            "the loss compares samples of a batch with each other, or with a mean or deviation "
            f"over them, or divides, multiplies or bends such means ({name}); each of the "
            f"{self.parts} parts of a batch is compared within itself, so the loss is another one "
            "than that of one device: leave out dp, pp and mb "
            "(tpN:1d and remat keep a batch whole), compute statistics of targets, such as "
            "normalised advantages, before engine.step, and quotients, such as Dice, sample by "
            "sample",
            stacklevel=2,
        )

    def _warn_of_mixed_positions(self, name: str) -> None:
        warnings.warn(
            "the loss takes positions of a sequence together, as attention, a shift of labels or "
            f"a sum over a sequence does ({name}); under cp it gets one of {self.sequences} parts "
            "of each sequence, so the loss is another one than that of one device: shift targets "
            "before engine.step, call other models, such as a frozen teacher, before it or inside "
            "the model's forward, or leave cp out",
            stacklevel=2,
        )

    def _warn_of_a_count_of_samples(self) -> None:
        warnings.warn(
            "the loss returns (sum, count), a sum over positions and the number of samples; under "
            f"cp each of the {self.sequences} parts of a sequence counts its samples, so the loss "
            f"and its gradient are divided by {self.sequences}: count positions, such as "
            f"labels.numel(), or return (sum, len(targets) / {self.sequences})",
            stacklevel=2,
        )

    def _warn_of_a_sum(self) -> None:
        warnings.warn(
            "the loss returns one number, which counts as the mean over samples, and it is a sum "
            f"over them; over the {self.parts} parts of a batch the loss and its gradient are "
            f"divided by {self.parts}: return (sum, count) instead, such as cross_entropy(..., "
            "reduction='sum') and len(targets), or (sum, 1 / parts) to keep the sum itself",
            stacklevel=2,
        )


def _operations(loss: PyTree) -> tuple[str, ...]:
    """The names of the last operations that made a loss, or its sum; of none without gradients."""
    first = loss[0] if isinstance(loss, tuple) and loss else loss
    nodes = [first.grad_fn] if isinstance(first, Tensor) else []
    for node in nodes:  # it grows
        if node is not None and len(nodes) < OPERATIONS:
            nodes += [before for before, _ in node.next_functions]
    return tuple(node.name() for node in nodes[:OPERATIONS] if node is not None)


def _counts_samples(
    loss: tuple[Tensor, Tensor | float], sums: SampleSums, means: UnevenMeans, along: MixedPositions
) -> bool:
    """Whether a loss is a sum over positions, with the number of samples as its count."""
    total, count = loss[0], loss[-1]
    if not isinstance(count, int | float) and not (isinstance(count, Tensor) and not count.dim()):
        return False
    is_sum = len(loss) == 2 and isinstance(total, Tensor) and sums.has(total)
    return is_sum and not means.is_of_batch(count) and along.is_number_of_samples(count)


def _has_minus_ones(targets: PyTree) -> bool:
    """Whether some targets [B, T] are classes from 0 to at least 2, or -1."""
    leaves = [leaf for leaf in leaves_of(targets) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.dim() > 1 and leaf.dtype == torch.int64 and leaf.numel():
            low, high = leaf.aminmax()
            if low == MINUS_ONE and high > 1:
                return True
    return False


def targets_of_samples(targets: PyTree, ignored: Collection[int]) -> Iterator[tuple[int, Tensor]]:
    """Which leaves are classes, each with the number of unmasked ones of every sample [B]."""
    for place, leaf in enumerate(leaves_of(targets)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.dtype == torch.int64 and len(leaf):
            masked = torch.isin(leaf, torch.tensor([*ignored], device=leaf.device))
            yield place, (~masked).reshape(len(leaf), -1).sum(1)
