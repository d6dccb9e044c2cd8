"""The wrong gradient as a sum of what each slice of the batch contributes: which slices count how
often.

Let g(d, m) be the contributions of data rank d and micro-batch m, whose plain sum is the right
gradient. Least squares gives c(d, m) in `gradient = sum c(d, m) g(d, m)`. The pattern of c is the
diagnosis; no other measurement tells a mean of means from a lost micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.errors import some_of
from plait.verify.diagnosis.finding import (
    Facts,
    Finding,
    coefficients,
    fit_scale,
    reach,
)
from plait.verify.record.observation import Contribution, Gradients, Observation

MOST = 0.2  # beyond it no pattern of coefficients could be told from another


@dataclass(frozen=True)
class Coefficients:
    """The coefficient of every contribution.

    `close` is how far the errors that pass may move one. It follows from the bound of the run's
    precision, and from how alike the contributions are.
    """

    parts: Sequence[Contribution]
    values: Sequence[float]
    close: float

    def known(self) -> list[tuple[Contribution, float]]:
        """The contributions whose coefficient is determined (one without any target is not)."""
        return [
            (part, value)
            for part, value in zip(self.parts, self.values, strict=True)
            if not math.isnan(value)
        ]

    def by(self, key: Callable[[Contribution], int]) -> dict[int, float] | None:
        """The coefficient as a function of `key`; None when it is not one."""
        found: dict[int, float] = {}
        for part, value in self.known():
            if abs(found.setdefault(key(part), value) - value) > self.close * max(1.0, abs(value)):
                return None
        return found


def contribution_findings(
    seen: Observation,
    truth: Observation,
    facts: Facts,
    slack: float,
    wrong: Sequence[str] = (),
) -> list[Finding]:
    """The findings from the coefficients; empty without contributions, or when no sum of them gives
    the gradient.

    Where gradients are sharded and no one sum fits them all, each rank's shard is fitted by itself.
    """
    parts = list(truth.contributions)
    if len(parts) < 2:
        return []
    clip = fit_scale(
        truth.grads, _sum(parts)
    ).scale  # one factor for all: the division by the count, and clipping
    if not clip:
        return []
    weights = _weights(seen.grads, parts, clip, slack)
    if weights is not None:
        return _read(weights, facts)
    by_rank = {
        rank: _weights_of_shard(seen.grads, parts, clip, slack, shard)
        for rank, shard in enumerate(seen.shards)
        if shard
    }
    fitted = {rank: weights for rank, weights in by_rank.items() if weights is not None}
    if not fitted and 0 < len(wrong) < len(seen.grads):
        return _of_some(seen, parts, wrong, facts, clip=clip, slack=slack)
    if len(fitted) > 1 and all(_own_alone(weights, rank) for rank, weights in fitted.items()):
        text = (
            "each rank's shard holds the gradient of its own part of the batch: a reduction over "
            "dp is missing"
        )
        return [Finding("missing-reduction", "dp", text, 0.97)]
    found = [
        replace(one, text=f"{one.text} (in the shard of rank {rank})")
        for rank, w in fitted.items()
        for one in _read(w, facts)
    ]
    return found[:1]


def _of_some(
    seen: Observation,
    parts: Sequence[Contribution],
    wrong: Sequence[str],
    facts: Facts,
    *,
    clip: float,
    slack: float,
) -> list[Finding]:
    """The pattern in the gradients that are wrong, where others are right."""
    own = {name: seen.grads.get(name) for name in wrong}
    some = [replace(part, grads={name: part.grads.get(name) for name in wrong}) for part in parts]
    weights = _weights(own, some, clip, slack)
    if weights is None:
        return []
    which = f" (in {some_of(wrong)})"
    return [
        replace(one, text=one.text + which, names=tuple(wrong)) for one in _read(weights, facts)
    ]


def _read(weights: Coefficients, facts: Facts) -> list[Finding]:
    """The first pattern that the coefficients have."""
    for question in (_nothing_wrong, _dropped_or_doubled, _mean_of_means, _factor_of_one_axis):
        found = question(weights, facts)
        if found is not None:
            return found
    shown = ", ".join(f"{one:.3f}" for one in weights.values)
    return [
        Finding(
            "slices",
            "data",
            f"the slices of the batch count {shown} times instead of once each",
            0.6,
        )
    ]


def _weights(
    value: Gradients, parts: Sequence[Contribution], clip: float, slack: float
) -> Coefficients | None:
    basis = [part.grads for part in parts]
    solved = coefficients(value, basis)
    if solved is None or solved[1] > slack:
        return None
    close = min(slack * reach(value, basis) / abs(clip), MOST)
    return Coefficients(parts, [one / clip for one in solved[0]], close)


def _weights_of_shard(
    value: Gradients,
    parts: Sequence[Contribution],
    clip: float,
    slack: float,
    shard: Mapping[str, tuple[int, int]],
) -> Coefficients | None:
    cut = [replace(part, grads=_cut(part.grads, shard)) for part in parts]
    found = _weights(_cut(value, shard), cut, clip, slack)
    return None if found is None else Coefficients(parts, found.values, found.close)


def _cut(grads: Gradients, shard: Mapping[str, tuple[int, int]]) -> Gradients:
    return {
        name: None if (g := grads.get(name)) is None else g.flatten()[start:stop]
        for name, (start, stop) in shard.items()
    }


def _own_alone(weights: Coefficients, rank: int) -> bool:
    return all(abs(value - (part.rank == rank)) < weights.close for part, value in weights.known())


def _sum(parts: Sequence[Contribution]) -> Gradients:
    total = {
        name: None if grad is None else grad.double().clone()
        for name, grad in parts[0].grads.items()
    }
    for part in parts[1:]:
        for name, grad in part.grads.items():
            present = total.get(name)
            if grad is not None:
                total[name] = grad.double().clone() if present is None else present + grad
    return total


def _nothing_wrong(weights: Coefficients, facts: Facts) -> list[Finding] | None:
    """All alike: a factor, which is another question's answer."""
    found = weights.by(lambda part: 0)
    return None if found is None else []


def _dropped_or_doubled(weights: Coefficients, facts: Facts) -> list[Finding] | None:
    """Coefficients are whole numbers up to one common factor, some of them 0 or 2."""
    known = weights.known()
    present = [value for _, value in known if abs(value) > weights.close]
    if not present:
        return None
    unit = min(present, key=abs)
    times = [round(value / unit) for _, value in known]
    if (
        any(
            abs(value / unit - count) > 4 * weights.close / abs(unit)
            for (_, value), count in zip(known, times, strict=True)
        )
        or max(times) > 2
    ):
        return None
    scaled = (
        "" if abs(unit - 1) < weights.close else f", and what is there is {facts.explain(unit)[1]}"
    )
    lost = [part for (part, _), count in zip(known, times, strict=True) if count == 0]
    double = [part for (part, _), count in zip(known, times, strict=True) if count == 2]
    if lost:
        kept = [part for (part, _), count in zip(known, times, strict=True) if count > 0]
        axis, words = _name(lost, kept, weights.parts)
        return [Finding("dropped", axis, f"the gradient {words}{scaled}", 0.96)]
    if abs(unit - 1) > weights.close and ":" not in scaled:  # one is half of the other by chance
        return None
    once = [part for (part, _), count in zip(known, times, strict=True) if count == 1]
    axis, words = _place(double, once, weights.parts)
    return [Finding("doubled", axis, f"{words} count twice{scaled}", 0.95)]


def _name(
    lost: Sequence[Contribution], kept: Sequence[Contribution], parts: Sequence[Contribution]
) -> tuple[str, str]:
    axis, words = _place(lost, kept, parts)
    other_axis, others = _place(kept, lost, parts)
    if len(kept) < len(lost) and other_axis != "data":
        return other_axis, f"is that of {others} only"
    return axis, f"lacks {words}"


def _place(
    some: Sequence[Contribution], rest: Sequence[Contribution], parts: Sequence[Contribution]
) -> tuple[str, str]:
    """(axis, words) for a set of slices: whole data ranks, whole micro-batches, or single
    slices.
    """
    ranks = sorted({part.rank for part in some})
    micro = sorted({part.micro_batch for part in some})
    if len({part.rank for part in parts}) > 1 and not {part.rank for part in rest} & set(ranks):
        return "dp", f"data rank{_plural(ranks)}"
    if not {part.micro_batch for part in rest} & set(micro):
        return "mb", f"micro-batch{'es' if len(micro) > 1 else ''} {_range(micro)}"
    single = ", ".join(
        f"micro-batch {part.micro_batch} of data rank {part.rank}" for part in some[:3]
    )
    return ("mb" if len({part.micro_batch for part in parts}) > 1 else "data"), single


def _plural(numbers: Sequence[int]) -> str:
    return f"{'s' if len(numbers) > 1 else ''} {_range(numbers)}"


def _range(numbers: Sequence[int]) -> str:
    """`0 to 3` for a run of three or more, else `0, 2`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(str(number) for number in numbers)


def _mean_of_means(weights: Coefficients, facts: Facts) -> list[Finding] | None:
    """A mean was taken per part, and then over the parts: each part's weight is inverse to its
    count.

    The parts may be slices, ranks or micro-batches. With counts n of the parts, c * n is one number
    for all of them.
    """
    every = weights.known()
    rank_count = _counts(every, lambda part: part.rank)
    micro_count = _counts(every, lambda part: part.micro_batch)
    questions: list[tuple[str, str, Callable[[Contribution], float]]] = [
        ("dp", "data ranks", lambda part: rank_count[part.rank]),
        ("mb", "micro-batches", lambda part: micro_count[part.micro_batch]),
        ("mb", "micro-batches of each data rank", lambda part: part.count / rank_count[part.rank]),
        ("dp+mb", "slices", lambda part: part.count),
    ]
    if len(rank_count) == 1:
        questions = [("mb", "micro-batches", lambda part: part.count)]
    elif len(micro_count) == 1:
        questions = questions[:1]
    for axis, parts, count in questions:
        products = [value * count(part) for part, value in every]
        if len({round(count(part), 9) for part, _ in every}) > 1 and max(products) - min(
            products
        ) <= 4 * weights.close * max(count(part) for part, _ in every):
            text = (
                f"a mean of means: the {parts} hold unequal numbers of unmasked targets and each "
                f"is divided by its own{_times(every, products[0], count, facts)}"
            )
            return [Finding("mean-of-means", axis, text, 0.96)]
    return None


def _times(
    every: Sequence[tuple[Contribution, float]],
    product: float,
    count: Callable[[Contribution], float],
    facts: Facts,
) -> str:
    """A factor of the run on top of a mean of means; empty where none is known."""
    weighed = sum(part.count / count(part) for part, _ in every)
    factor = product * weighed / sum(part.count for part, _ in every)
    clause = facts.explain(factor)[1]
    return f", and every gradient is {clause}" if ":" in clause else ""


def _counts(
    known: Sequence[tuple[Contribution, float]], key: Callable[[Contribution], int]
) -> dict[int, float]:
    totals: dict[int, float] = {}
    for part, _ in known:
        totals[key(part)] = totals.get(key(part), 0.0) + part.count
    return totals


def _factor_of_one_axis(weights: Coefficients, facts: Facts) -> list[Finding] | None:
    """The coefficient depends on the rank alone, or on the micro-batch alone."""
    for axis, word, key in (
        ("dp", "data rank", lambda part: part.rank),
        ("mb", "micro-batch", lambda part: part.micro_batch),
    ):
        factors = weights.by(key)
        if factors is not None and len(factors) > 1:
            clauses = {
                value: facts.explain(value)[1]
                for value in factors.values()
                if abs(value - 1) > weights.close
            }
            known = sorted({clause for clause in clauses.values() if ":" in clause})
            why = (
                f" ({'; '.join(known)})"
                if known
                else ": it is clipped or divided before the reduction"
                if axis == "dp"
                else ""
            )
            words = "micro-batches" if word == "micro-batch" else f"{word}s"
            text = f"{words} count with factors of their own, {_grouped(factors)}{why}"
            return [Finding("factor-by-" + axis, axis, text, 0.9)]
    return None


def _grouped(values: Mapping[int, float]) -> str:
    """`0 to 3: 0.2500, 4 to 7: 1.0000`."""
    groups: dict[str, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(f"{value:.4f}", []).append(number)
    return ", ".join(f"{_range(numbers)}: {value}" for value, numbers in list(groups.items())[:8])
