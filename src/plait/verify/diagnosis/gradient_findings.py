"""Findings about a wrong gradient, one question a function.

The strongest question needs the contributions of the slices (data rank d, micro-batch m). The wrong
gradient is then written as a sum of them by least squares. Coefficients of 1 are right. The pattern
of the others names dropped and doubled parts, means of means, and factors of one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.errors import some_of
from plait.verify.diagnosis.auxiliary_findings import auxiliary_loss
from plait.verify.diagnosis.contribution_findings import contribution_findings
from plait.verify.diagnosis.finding import Finding, coefficients, fit_scale
from plait.verify.diagnosis.number_findings import (
    clipped,
    loss_alone,
    norm_alone,
    norm_of_one_rank,
    wrong_count,
)
from plait.verify.diagnosis.precision_findings import rounded_gradients
from plait.verify.diagnosis.view import View
from plait.verify.record.compare import largest, relative_error
from plait.verify.record.observation import Gradients

MOST_TIED = (
    2  # weights that are tied are few; where most gradients are halves, something else is wrong
)


def gradient_findings(view: View, kinds: set[str]) -> list[Finding]:
    """All findings about loss, gradients and their norm in the first wrong step."""
    findings = (
        missing_names(view)
        + norm_alone(view, kinds)
        + norm_of_one_rank(view, kinds)
        + loss_alone(view, kinds)
        + wrong_count(view, kinds)
    )
    if "grad" in kinds:
        findings += lacks_reduction(view) or unsynchronised_copies(view)
        for question in (
            global_scale,
            kept_from_before,
            stale_weights,
            clipped,
            frozen_or_dead,
            rounded_gradients,
            with_weights,
            auxiliary_loss,
        ):
            findings += question(view)
        findings += contribution_findings(view.mine, view.truth, view.facts, view.slack, view.wrong)
        if not any(one.confidence >= 0.7 for one in findings):
            findings += scale_by_parameter(view)
    return findings


def missing_names(view: View) -> list[Finding]:
    """Parameters that exist on one side only."""
    findings = []
    truth = view.truth.params.keys()
    names_here = view.mine.params.keys()
    if lost := sorted(truth - names_here):
        text = f"{len(lost)} parameters are nowhere in the parallel run: {some_of(lost)}"
        findings.append(
            Finding(
                "missing-parameters",
                "pp" if view.facts.sizes.get("pp", 1) > 1 else "",
                text,
                0.9,
                tuple(lost),
            )
        )
    if new := sorted(names_here - truth):
        findings.append(
            Finding(
                "unknown-parameters",
                "",
                f"the reference does not know {some_of(new)}",
                0.9,
                tuple(new),
            )
        )
    return findings


def global_scale(view: View) -> list[Finding]:
    """Every gradient is the same factor away."""
    fit = fit_scale(view.mine.grads, view.truth.grads)
    if not fit.holds(view.slack) or abs(fit.scale - 1) < view.slack or fit.scale == 0.0:
        return []
    axis, clause = view.facts.explain(fit.scale)
    return [
        Finding("scale", axis, f"every gradient is {clause}", 0.95 if axis else 0.8, view.wrong)
    ]


def scale_by_parameter(view: View) -> list[Finding]:
    """Some parameters are a factor away each; those with one factor are reported together."""
    groups: dict[str, list[str]] = {}
    for name in view.wrong:
        fit = fit_scale(view.only(view.mine.grads, [name]), view.only(view.truth.grads, [name]))
        if fit.holds(view.slack) and fit.scale != 0.0 and abs(fit.scale - 1) > view.slack:
            groups.setdefault(f"{fit.scale:.5g}", []).append(name)
    findings = []
    for factor, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        axis, clause = view.facts.explain(float(factor))
        if ":" in clause or len(names) > 1:
            findings.append(
                Finding(
                    "scale-some",
                    axis,
                    f"the gradient of {some_of(names)} is {clause}",
                    0.65,
                    tuple(names),
                )
            )
    return findings[:3]


def lacks_reduction(view: View) -> list[Finding]:
    """The ranks' own gradients differ, and their sum (or mean) along an axis is the right one."""
    for axis, lines in view.facts.lines.items():
        for word, divide in (("sum", False), ("mean", True)):
            solved = [name for name in view.wrong if _combined_matches(view, name, lines, divide)]
            if solved:
                which = (
                    "every wrong gradient"
                    if len(solved) == len(view.wrong)
                    else f"the gradient of {some_of(solved)}"
                )
                text = f"{which} matches after a {word} over {axis}: a reduction is missing"
                return [Finding("missing-reduction", axis, text, 0.97, tuple(solved))]
    return []


def _combined_matches(
    view: View, name: str, lines: Sequence[tuple[int, ...]], divide: bool
) -> bool:
    truth = view.truth.grads.get(name)
    if truth is None:
        return False
    complete = [line for line in lines if len(line) > 1 and _all_have(view, name, line)]
    for line in complete:
        parts = [_grads(view, rank)[name] for rank in line]
        own = [part for part in parts if part is not None]
        if not own or any(part.shape != truth.shape for part in own):
            return False
        if len(own) == len(parts) and all(torch.equal(part, own[0]) for part in own):
            return False  # they were reduced: equal parts are a factor away, not apart
        total = sum(own[1:], own[0].double()) / (len(line) if divide else 1)
        if relative_error(total, truth, largest(view.truth.grads)) > view.slack:
            return False
    return bool(complete)


def _all_have(view: View, name: str, ranks: Sequence[int]) -> bool:
    return all(name in _grads(view, rank) for rank in ranks)


def _grads(view: View, rank: int) -> Gradients:
    seen = view.mine.ranks.get(rank)
    return seen.grads if seen else {}


def unsynchronised_copies(view: View) -> list[Finding]:
    """Copies of one parameter (tied weights) have gradients whose sum is the right one."""
    unknown = [
        grad
        for name, grad in view.mine.grads.items()
        if name not in view.truth.params and grad is not None
    ]
    tied = []
    for name in view.wrong:
        truth = view.truth.grads.get(name)
        own = view.mine.grads.get(name)
        copies = [
            grad for seen in view.mine.ranks.values() if (grad := seen.grads.get(name)) is not None
        ]
        pairs = [(own, other) for other in unknown if own is not None] + (
            [(copies[0], copies[1])]
            if len(copies) == 2 and not torch.equal(copies[0], copies[1])
            else []
        )
        for one, other in pairs:
            if truth is not None and one.shape == other.shape == truth.shape:
                error = relative_error(one + other, truth, largest(view.truth.grads))
                if error <= view.slack and name not in tied:
                    tied.append(name)
    if not 0 < len(tied) <= MOST_TIED:
        return []
    text = (
        f"the sum of the two copies of {some_of(tied)} is the right gradient: the tied weights "
        "are not synchronised"
    )
    return [
        Finding(
            "tied", "pp" if view.facts.sizes.get("pp", 1) > 1 else "tied", text, 0.98, tuple(tied)
        )
    ]


def kept_from_before(view: View) -> list[Finding]:
    """The gradient of the step before is still in it, or is used instead of this step's."""
    if view.mine_before is None:
        return []
    before = view.mine_before.grads
    fitted = coefficients(view.mine.grads, [view.truth.grads, before])
    if fitted is None or fitted[1] > view.slack or abs(fitted[0][1]) < 1e-3:
        return []
    now, old = fitted[0]
    if abs(now) < 1e-3:
        text = "the gradient is that of the step before: it was not recomputed, or reduced too late"
    else:
        text = (
            "the gradient of the step before is added to this one: gradients are not set to zero "
            "between steps"
        )
    return [
        Finding(
            "gradient-kept",
            "optimizer",
            f"{text} ({now:.4f} of this step, {old:.4f} of the one before)",
            0.93,
        )
    ]


def with_weights(view: View) -> list[Finding]:
    """A multiple of the weights is added to the gradients."""
    if view.before is None:
        return []
    weights = view.only(view.before, view.truth.grads)
    fitted = coefficients(view.mine.grads, [view.truth.grads, weights])
    if fitted is None or fitted[1] > view.slack or abs(fitted[0][0] - 1) > 1e-3:
        return []
    decay = fitted[0][1]
    if abs(decay) < 1e-6:
        return []
    text = (
        f"{decay:.4g} times the weights is added to the gradients: decay goes through the moments"
    )
    return [Finding("weight-decay", "optimizer", text, 0.94, view.wrong)]


def stale_weights(view: View) -> list[Finding]:
    """The gradient belongs to the weights before the last update."""
    fit = fit_scale(view.mine.grads, view.truth.stale_grads)
    if not view.truth.stale_grads or not fit.holds(view.slack) or abs(fit.scale - 1) > view.slack:
        return []
    text = (
        "the gradient is that of the weights before the last update: stale parameters were used in "
        "the forward"
    )
    return [Finding("stale-weights", "dp", text, 0.97)]


def frozen_or_dead(view: View) -> list[Finding]:
    """Gradients that one side does not have."""
    findings = []
    checks: list[tuple[str, str, Callable[[str], bool]]] = [
        (
            "dead",
            "has no gradient in the parallel run",
            lambda name: _zero(view.mine.grads, name) and not _zero(view.truth.grads, name),
        ),
        (
            "frozen",
            "has a gradient where the reference has none (frozen or unused)",
            lambda name: view.truth.grads.get(name) is None,
        ),
    ]
    for cause, clause, wrong in checks:
        names = [name for name in view.wrong if wrong(name)]
        if names and len(names) < len(view.truth.grads):
            findings.append(Finding(cause, "", f"{some_of(names)} {clause}", 0.75, tuple(names)))
    return findings


def _zero(grads: Gradients, name: str) -> bool:
    grad = grads.get(name)
    return grad is None or not bool(grad.any())
