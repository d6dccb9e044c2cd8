"""Sees over which targets a loss takes means, and whether it may take one in a way not followed.

The mean of `cross_entropy` is over the targets that are not masked, as the loss made them. Where
functions of torch alone lead from the targets to a mean over all places, none was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.batch_trees import leaves_of
from plait.engine.notes import Notes
from plait.engine.sample_sums import SampleSums
from plait.models.losses import IGNORE
from plait.parallel.data.absent import only_describes
from plait.torch_internals import has_function_transforms
from plait.values import PyTree

MEANS_OF_CLASSES: Final = {"cross_entropy": 1, "nll_loss": 1, "linear_cross_entropy": 2}
"""Functions that leave out masked targets, each with the place of the targets."""

CHOICES: Final = frozenset(
    {
        *("nonzero", "nonzero_static", "argwhere", "masked_select", "unique", "flatnonzero"),
        *("unique_consecutive", "bincount", "histc"),
    }
)
"""Functions whose results say how many places there are of a kind."""

MEANS_OR_ONE_PLACE: Final = frozenset(
    {"mean", "getitem", "select", "unbind", "to", "float", "double"}
)
"""Functions whose numbers are means over all places, or those of one place."""


@dataclass(frozen=True)
class TargetMean:
    """A mean over targets that are classes.

    Attributes:
        ignored: the class that it leaves out.
        is_masked: whether some targets are of that class.
        counts: the numbers of other targets that samples have.
    """

    ignored: int
    is_masked: bool
    counts: set[int]


class TargetMeans(TorchFunctionMode):
    """Follows targets [B, ...] of a micro-batch through a loss.

    Attributes:
        means: the means over targets, in the order of their calls.
        reads_targets: whether the loss computes with targets, as it need not where the model does.
    """

    def __init__(self, output: PyTree, targets: PyTree, sums: SampleSums) -> None:
        super().__init__()
        self.means: list[TargetMean] = []
        self.reads_targets = False
        self._sums = sums
        self._is_hidden = False
        self._followed = Notes[bool]()
        self._beside = Notes[bool]()  # made of parameters alone, as a penalty is
        self._given = Notes[bool]()
        self._rows = Notes[int]()
        for leaf in leaves_of((output, targets)):
            if isinstance(leaf, Tensor):
                self._followed.add(leaf, True)
                self._given.add(leaf, True)
        for leaf in leaves_of(targets):
            if isinstance(leaf, Tensor):
                self._rows.add(leaf, _length(leaf))

    def follows(self, loss: Tensor) -> bool:
        """Whether a loss (0-dim) came from targets, and all that may leave some out was seen."""
        return loss in self._rows and not self._is_hidden

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and look at what it does with targets."""
        named = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunction():
            is_unknown = any(self._is_unknown(one) for one in given)
        result = function(*args, **named)
        if has_function_transforms() or is_unknown or isinstance(function, _OPS):
            self._is_hidden = True
        elif not any(one in self._followed for one in given):
            self._note_beside(result)
        elif not only_describes(function):
            with torch._C.DisableTorchFunction():
                self._look(function.__name__.strip("_"), args, named, given, result)
        return result

    def _is_unknown(self, one: Tensor) -> bool:
        """Whether a tensor [...] may have been made of targets where no mode saw it."""
        is_made = one.grad_fn is not None
        return is_made and one not in self._followed and one not in self._beside

    def _note_beside(self, result: PyTree) -> None:
        """Note that a result was made of no output or target, but of parameters at most."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._beside.add(leaf, True)

    def _look(
        self,
        name: str,
        args: Sequence[Any],
        named: Mapping[str, Any],
        given: Sequence[Tensor],
        result: PyTree,
    ) -> None:
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        rows = [known for one in given if (known := self._rows.get(one)) is not None]
        self.reads_targets = self.reads_targets or bool(rows)
        if name in MEANS_OF_CLASSES:
            self._look_at_a_mean(args, named, MEANS_OF_CLASSES[name])
        is_read = bool(rows) and not made and name != "setitem"
        if is_read or _chooses(name, args) or any(self._is_count(one, made) for one in given):
            self._is_hidden = True
        if any(self._adds_up(name, named, given, one) for one in made):
            self._is_hidden = True
        for one in [*given[:1], *made] if name == "setitem" else made:
            self._followed.add(one, True)
            if rows:
                is_turned = bool(made) and _is_turned(given[0], one)
                self._rows.add(one, 0 if is_turned else min(rows))

    def _look_at_a_mean(self, args: Sequence[Any], named: Mapping[str, Any], place: int) -> None:
        target = named.get("target", args[place] if len(args) > place else None)
        if named.get("reduction", "mean") != "mean" or not isinstance(target, Tensor):
            return
        if target.is_floating_point() or self._sums.is_of_one_sample(args[0]):
            return
        rows = self._rows.get(target)
        ignored = IGNORE if named.get("ignore_index") is None else named["ignore_index"]
        kept = target != ignored
        if not rows or kept.numel() % rows:
            self._is_hidden = True
            rows = 1
        counts = set(kept.reshape(rows, -1).sum(1).tolist())
        self.means.append(TargetMean(ignored, not bool(kept.all()), counts))

    def _is_count(self, number: Tensor, made: Sequence[Tensor]) -> bool:
        """Whether a number (0-dim) of all samples, without a gradient, meets their losses."""
        is_computed = number in self._followed and number not in self._given
        is_number = is_computed and not number.dim() and not number.requires_grad
        return is_number and any(one.dim() or one.requires_grad for one in made)

    def _adds_up(
        self, name: str, named: Mapping[str, Any], given: Sequence[Tensor], made: Tensor
    ) -> bool:
        """Whether a result is one number over places that is no mean over all of them."""
        if made.dim() or not made.requires_grad or not any(one.dim() for one in given):
            return False
        is_mean = name in MEANS_OR_ONE_PLACE or named.get("reduction") in ("mean", "batchmean")
        return not is_mean and not self._sums.is_of_one_sample(given[0])


_OPS: Final = (OpOverload, OpOverloadPacket)
"""Functions of libraries, whose names say nothing of what they compute."""


def _length(leaf: Tensor) -> int:
    return (
        leaf.shape[0] if leaf.layout is torch.strided and not leaf.is_nested and leaf.dim() else 0
    )


def _chooses(name: str, args: Sequence[Any]) -> bool:
    """Whether a function takes as many places as a mask has, or counts them."""
    indices = [one for one in tree_leaves(args[1:]) if isinstance(one, Tensor)]
    is_masked = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
    return (
        name in CHOICES or (name == "where" and len(args) == 1) or (name == "getitem" and is_masked)
    )


def _is_turned(source: Tensor, made: Tensor) -> bool:
    """Whether a view of a tensor has another dim first."""
    if not made._is_view() or not source.dim() or not made.dim():
        return False
    return made.stride(0) != source.stride(0) and made.dim() == source.dim()
