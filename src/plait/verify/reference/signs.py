"""Signs of gradients that rounding decides, under an optimizer that goes by them.

The first update of Adam is as large as the rate, however small the gradient. Where the bound of an
element's gradient holds zero, a right run may go up or down there. Six runs with other rounding
show this only by chance. So the optimizer's rule is computed with each gradient at both ends of its
bound. Such an element may lie anywhere between the two ends; all others are judged as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.verify.record.compare import Difference, Key, differences, peak
from plait.verify.record.observation import Record, Tensors
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import RoundingBounds
from plait.verify.reference.underflow import Place
from plait.verify.reference.updates import trained, updated


@dataclass(frozen=True)
class UpdateEnds:
    """How far each element of the parameters [...] goes from the reference's, after each step.

    Gradients are at the lower or at the upper end. It is 0 where no sign is in doubt.
    """

    least: Sequence[Tensors]
    most: Sequence[Tensors]

    @classmethod
    def of(cls, reference: Record, recipe: Recipe, ways: Mapping[Place, Tensor]) -> UpdateEnds:
        """The ends by the rule in float64; a gradient may move by its one of `ways` [...]."""
        sides = [_gone(reference, recipe, ways, side) for side in (-1, 1)]
        least: list[Tensors] = []
        most: list[Tensors] = []
        doubtful: dict[str, Tensor] = {}
        for step, (low, high) in enumerate(zip(*sides, strict=True)):
            for name in low:
                doubt = _in_doubt(reference.steps[step].grads.get(name), ways.get((step, name)))
                if doubt is not None:
                    doubtful[name] = doubt | doubtful.get(name, doubt)
            ends = {name: (low[name] * one, high[name] * one) for name, one in doubtful.items()}
            least.append({name: torch.minimum(*pair).clamp(max=0) for name, pair in ends.items()})
            most.append({name: torch.maximum(*pair).clamp(min=0) for name, pair in ends.items()})
        return cls(least, most)

    def beyond(self, value: Tensor, right: Tensor, found: Difference, limit: float) -> float:
        """The error of a parameter's value [...] as far as no sign explains it.

        Only those elements are explained whose ends lie beyond the limit themselves.
        """
        name = found.name
        if name not in self.least[found.step] or not math.isfinite(found.error):
            return found.error
        low, high = self.least[found.step][name], self.most[found.step][name]
        gap = value.double() - right.double()
        per_error = peak(gap) / found.error
        far = torch.maximum(-low, high) > limit * per_error
        rest = torch.where(far, gap - gap.clamp(low, high), gap)
        return peak(rest) / per_error


def beyond_the_ends(
    parallel: Record, reference: Record, recipe: Recipe, bounds: RoundingBounds
) -> dict[Key, float]:
    """The errors that remain of parameters above their bounds, by number, where signs explain some.

    Empty in float32 and float64, and where no parameter is above its bound.
    """
    if not bounds.ways:
        return {}
    passes = {one: bounds.limits.get(one.key, bounds.least) for one in _params(parallel, reference)}
    failed = {one: limit for one, limit in passes.items() if one.error > limit}
    ends = UpdateEnds.of(reference, recipe, bounds.ways) if failed else None
    errors = {}
    for one, limit in failed.items():
        value = parallel.steps[one.step].params.get(one.name)
        right = reference.steps[one.step].params.get(one.name)
        if ends is not None and value is not None and right is not None:
            errors[one.key] = ends.beyond(value, right, one, limit)
    return errors


def _params(parallel: Record, reference: Record) -> list[Difference]:
    """The differences of parameters after each update."""
    return [one for one in differences(parallel, reference) if one.kind == "param"]


def _in_doubt(grad: Tensor | None, way: Tensor | None) -> Tensor | None:
    """The elements of a gradient [...] whose bound holds zero."""
    return None if grad is None or way is None else grad.abs() < way


def _gone(
    reference: Record, recipe: Recipe, ways: Mapping[Place, Tensor], side: int
) -> list[Tensors]:
    """How far the rule goes from itself with all gradients at one end, summed over the steps."""
    names = trained(reference)
    steps = []
    for step, seen in enumerate(reference.steps):
        grads = dict(seen.grads)
        for name in names:
            grad, way = grads.get(name), ways.get((step, name))
            if grad is not None and way is not None:
                grads[name] = grad.double() + side * way.double()
        steps.append(replace(seen, grads=grads))
    moved = updated(Record(reference.start, steps), names, recipe, torch.float64)
    plain = updated(reference, names, recipe, torch.float64)
    total = {name: torch.zeros_like(plain[0][name]) for name in names}
    gone: list[Tensors] = []
    for there, here in zip(moved, plain, strict=True):
        total = {name: total[name] + there[name] - here[name] for name in names}
        gone.append(total)
    return gone
