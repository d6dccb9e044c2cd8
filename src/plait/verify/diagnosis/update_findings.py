"""Findings about a wrong start, a wrong update or drifted replicas, where the gradients are right.

The update u = (parameters after) - (parameters before) is compared with the reference's update. The
*place* of an error (a flat range) tells a shard from a parameter. Its *shape* (a multiple of the
update, of the weights) tells the option.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.errors import some_of
from plait.verify.diagnosis.finding import Facts, Finding, coefficients, fit_tensors
from plait.verify.diagnosis.precision_findings import rounded
from plait.verify.diagnosis.view import View
from plait.verify.record.compare import Difference, largest
from plait.verify.record.observation import Record, Tensors

NESTEROV = "one plus the momentum, as in the first step of Nesterov's"


def start_findings(parallel: Record, reference: Record, wrong: Sequence[str]) -> list[Finding]:
    """The runs do not start from the same weights: the seed, or the slice that each rank cuts from
    it.
    """
    assert parallel.start is not None and reference.start is not None
    weights = parallel.start
    truth = reference.start
    lost = [name for name in wrong if name not in weights or name not in truth]
    if lost:
        return [
            Finding(
                "missing-parameters",
                "init",
                f"only one side has {some_of(lost)}",
                0.95,
                tuple(lost),
            )
        ]
    which = (
        "no parameter starts"
        if len(wrong) == len(truth)
        else f"{some_of(wrong)} do{'es' if len(wrong) == 1 else ''} not start"
    )
    findings = [
        Finding(
            "init",
            "init",
            f"{which} from the values of one device: a wrong seed, or ranks that start apart",
            0.9,
            tuple(wrong),
        )
    ]
    repeated = [name for name in wrong if _repeats(weights[name]) and not _repeats(truth[name])]
    if repeated:
        text = (
            f"the halves of {some_of(repeated)} start equal: each rank fills its shard from the "
            "same seed"
        )
        findings.append(Finding("init-shards", "init+tp", text, 0.95, tuple(repeated)))
    return findings


def _repeats(value: Tensor) -> bool:
    """Some dim has two equal halves, without being constant."""
    if value.numel() < 4 or bool((value == value.flatten()[0]).all()):
        return False
    halves = (value.chunk(2, dim) for dim in range(value.dim()) if value.shape[dim] % 2 == 0)
    return any(torch.equal(first, second) for first, second in halves)


def replica_findings(view: View, wrong: Sequence[Difference]) -> list[Finding]:
    """Ranks that should hold one value hold several."""
    names = list(dict.fromkeys(one.name for one in wrong))
    odd = {one.rank for one in wrong if one.rank is not None}
    holders = {
        rank for rank, seen in view.mine.ranks.items() if not seen.params.keys().isdisjoint(names)
    }
    ranks = sorted(odd | {min(holders - odd)} if holders - odd else odd)
    axes = [axis for axis, lines in view.facts.lines.items() if _some_differ(lines, odd)]
    text = (
        f"replicas of {some_of(names)} differ on ranks {', '.join(map(str, ranks))} after the "
        "update"
    )
    return [Finding("replicas", axes[0] if axes else "dp", text, 0.85, tuple(names))]


def _some_differ(lines: Sequence[tuple[int, ...]], odd: set[int]) -> bool:
    """Whether a line of an axis has odd ranks beside others."""
    return any(odd & set(line) and set(line) - odd for line in lines)


def update_findings(
    view: View,
    mine_before: Tensors | None,
    truth_before: Tensors | None,
    wrong: Sequence[str],
    step: int,
) -> list[Finding]:
    """The gradients of the step are right and the weights after it are not."""
    if mine_before is None or truth_before is None:
        return []
    names = [
        name
        for name in view.truth.params
        if name in view.mine.params and name in mine_before and name in truth_before
    ]
    frozen = [
        name
        for name in wrong
        if view.truth.grads.get(name) is None and _moved(view.mine.params, mine_before, name)
    ]
    if frozen:
        return [
            Finding(
                "frozen-moved",
                "optimizer",
                f"{some_of(frozen)} moved, which no gradient asks for",
                0.96,
                tuple(frozen),
            )
        ]
    changes = {name: view.mine.params[name].double() - mine_before[name].double() for name in names}
    truth = {name: view.truth.params[name].double() - truth_before[name].double() for name in names}
    still = [
        name
        for name in wrong
        if name in truth and bool(truth[name].any()) and not bool(changes[name].any())
    ]
    findings = _still(still, wrong, len([name for name in names if bool(truth[name].any())]))
    if not still:
        findings += rounded(view.mine.params, view.truth.params, tuple(wrong), "weights")
        findings += _scaled(view, changes, truth) or _decayed(
            view, changes, truth, truth_before, wrong
        )
        findings += _range_of(view, changes, truth, wrong)
    if not findings and step > 0:
        text = (
            f"step {step} updates wrongly from right gradients, the steps before do not: the state "
            "of the optimizer is wrong"
        )
        findings.append(Finding("optimizer-state", "optimizer", text, 0.7, tuple(wrong)))
    if not findings:
        text = (
            f"right gradients in step {step} and a wrong update of {some_of(wrong)}: the rule "
            "or its options differ"
        )
        findings.append(Finding("update", "optimizer", text, 0.6, tuple(wrong)))
    return findings


def _moved(after: Tensors, before: Tensors, name: str) -> bool:
    return name in after and name in before and not torch.equal(after[name], before[name])


def _still(still: Sequence[str], wrong: Sequence[str], num_moving: int) -> list[Finding]:
    """Weights that are those of the step before."""
    if not still:
        return []
    all_of_them = len(still) == num_moving
    which = (
        "every parameter is"
        if all_of_them
        else f"{some_of(still)} {'is' if len(still) == 1 else 'are'}"
    )
    text = f"{which} as before the update: not updated, or stale values were gathered"
    return [Finding("stale", "optimizer" if all_of_them else "dp", text, 0.92, tuple(still))]


def _scaled(view: View, mine: Tensors, truth: Tensors) -> list[Finding]:
    """Every update is one factor away: the learning rate, or how often it is applied."""
    fitted = coefficients(mine, [truth])
    if fitted is None or fitted[1] > 100 * view.slack or abs(fitted[0][0] - 1) < view.slack:
        return []
    ratio = fitted[0][0]
    rates = _rates(view, ratio)
    _, clause = Facts(view.facts.sizes).explain(ratio)
    why = rates or (
        "the update was applied twice"
        if abs(ratio - 2) < 1e-3
        else "the learning rate differs, or it is applied more than once"
    )
    text = f"every update is {ratio:.6f} times that of one device: {why}" + (
        f", or {clause.split(': ')[1]}" if ":" in clause else ""
    )
    momentum = view.facts.numbers.get(NESTEROV)
    if momentum is not None and abs(ratio - momentum) < 1e-4:
        text = f"every update is {ratio:.6f} times that of one device: {NESTEROV}"
        return [Finding("update", "optimizer", text, 0.93)]
    cause = "updated-twice" if abs(ratio - 2) < 1e-3 and not rates else "learning-rate"
    return [Finding(cause, "lr" if cause == "learning-rate" else "optimizer", text, 0.93)]


def _rates(view: View, ratio: float) -> str:
    """The schedule's neighbouring steps, when the factor is a quotient of two learning rates."""
    rates = {
        name: value
        for name, value in view.facts.numbers.items()
        if name.startswith("learning rate of step ")
    }
    own = view.truth.lr
    for name, rate in rates.items():
        if own and abs(rate / own - ratio) < 1e-4 * abs(ratio):
            return f"it uses the {name} instead of this one's"
    return ""


def _decayed(
    view: View, mine: Tensors, truth: Tensors, before: Tensors, wrong: Sequence[str]
) -> list[Finding]:
    """The rest of the update is a multiple of the weights: weight decay."""
    decays = []
    for name in wrong:
        if name in truth:
            gap = mine[name] - truth[name]
            old = before[name].double()
            fits = (fit_tensors(gap, old), fit_tensors(gap, old + truth[name]))
            fit = min(fits, key=lambda one: one.residual)
            if fit.holds(1e-3) and fit.scale != 0.0:
                decays.append((name, fit.scale))
    known = [name for name in wrong if name in truth and bool(before[name].any())]
    if not decays or 2 * len(decays) < len(known):
        return []
    names = [name for name, _ in decays]
    word = "missing" if decays[0][1] > 0 else "too strong"
    return [
        Finding(
            "weight-decay",
            "optimizer",
            f"weight decay of {some_of(names)} is {word}",
            0.94,
            tuple(names),
        )
    ]


def _range_of(view: View, mine: Tensors, truth: Tensors, wrong: Sequence[str]) -> list[Finding]:
    """Only some elements are wrong: a shard of the flat parameters, or a bucket."""
    scale = largest(view.truth.params)
    part = []
    whole = []
    spans = 0
    for name in wrong:
        if name not in truth:
            continue
        gap = (mine[name] - truth[name]).abs().flatten()
        bad = (
            (gap > view.tolerance * max(float(view.truth.params[name].abs().max()), 1e-4 * scale))
            .nonzero()
            .flatten()
        )
        if len(bad) and len(bad) < gap.numel() and int(bad[-1]) - int(bad[0]) + 1 < gap.numel():
            part.append(f"{name}[{int(bad[0])}:{int(bad[-1]) + 1}] of {gap.numel()}")
            spans += int(bad[-1]) - int(bad[0]) + 1
        else:
            whole.append(name)
    right = [name for name in truth if name not in wrong and bool(truth[name].any())]
    wrong_numel = sum(truth[name].numel() for name in wrong if name in truth)
    moving = sum(value.numel() for value in truth.values() if bool(value.any()))
    of_one = len(wrong) == 1 and 2 * spans <= wrong_numel
    if part and (wrong_numel <= 0.8 * moving or of_one):
        more = f" and all of {some_of(whole)}" if whole else ""
        return [
            Finding(
                "shard",
                "dp",
                f"only a flat range is updated wrongly: {some_of(part, 2)}{more}: one rank's shard",
                0.8,
                tuple(wrong),
            )
        ]
    if right and whole and _tail(whole, list(truth)):
        return [
            Finding(
                "shard",
                "dp",
                f"the update of {some_of(whole)} is wrong, of the others right: a bucket or a "
                "shard",
                0.72,
                tuple(whole),
            )
        ]
    return []


def _tail(names: Sequence[str], order: Sequence[str]) -> bool:
    """The names stand together in the order of the parameters."""
    places = sorted(order.index(name) for name in names)
    return places[-1] - places[0] == len(places) - 1
