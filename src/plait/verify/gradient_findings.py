"""What a wrong gradient looks like, one question a function.

The strongest question needs the contributions of the slices (data rank d, micro-batch m): the wrong gradient is then written
as a sum of them by least squares. Coefficients of 1 are right; the pattern of the others names dropped and doubled parts, means
of means, and factors that belong to one axis only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait.verify.compare import largest, relative_error, relative_number
from plait.verify.contribution_findings import contribution_findings
from plait.verify.finding import Facts, Finding, coefficients, dot, fit_scale, list_names
from plait.verify.observation import Gradients, Observation


@dataclass(frozen=True)
class View:
    """The first wrong step: both observations, those of the step before, the numbers of the run, how well a fit must fit."""

    mine: Observation
    truth: Observation
    mine_before: Observation | None
    truth_before: Observation | None
    facts: Facts
    slack: float
    wrong: tuple[str, ...]
    tolerance: float

    def only(self, grads: Gradients, names: Iterable[str]) -> Gradients:
        """The gradients of some names."""
        return {name: grads[name] for name in names if name in grads}


def gradient_findings(view: View, kinds: set[str]) -> list[Finding]:
    """All findings about loss, gradients and their norm in the first wrong step."""
    found = missing_names(view) + norm_alone(view, kinds) + loss_alone(view, kinds) + wrong_count(view, kinds)
    if "grad" in kinds:
        for question in (
            lacks_reduction,
            unsynchronised_copies,
            global_scale,
            kept_from_before,
            stale_weights,
            clipped,
            frozen_or_dead,
        ):
            found += question(view)
        found += contribution_findings(view.mine, view.truth, view.facts, view.slack)
        if not any(one.confidence >= 0.7 for one in found):
            found += scale_by_parameter(view)
    return found


def missing_names(view: View) -> list[Finding]:
    """Parameters that exist on one side only."""
    found = []
    truth, mine = view.truth.params.keys(), view.mine.params.keys()
    if lost := sorted(truth - mine):
        text = f"{len(lost)} parameters are nowhere in the parallel run: {list_names(lost)}"
        found.append(Finding("missing-parameters", "pp" if view.facts.sizes.get("pp", 1) > 1 else "", text, 0.9, tuple(lost)))
    if new := sorted(mine - truth):
        found.append(Finding("unknown-parameters", "", f"the reference does not know {list_names(new)}", 0.9, tuple(new)))
    return found


def norm_alone(view: View, kinds: set[str]) -> list[Finding]:
    """The gradients before clipping cannot be seen; their norm can."""
    if "grad_norm" not in kinds or view.mine.grad_norm is None or not view.truth.grad_norm:
        return []
    ratio = view.mine.grad_norm / view.truth.grad_norm
    if "grad" in kinds and not fit_scale(view.mine.grads, view.truth.grads).holds(view.slack):
        return []
    axis, clause = view.facts.explain(ratio**2)
    if ":" in clause and abs(ratio**2 - 1) > 1e-3:
        text = f"the square of the gradient norm is {clause}: parts of it are counted more than once, or left out"
        return [Finding("norm", axis, text, 0.85)]
    same = _same_norm_of_other_part(view)
    if same:
        return [same]
    text = f"the gradient norm is {view.mine.grad_norm:.10g} instead of {view.truth.grad_norm:.10g}"
    return [Finding("norm", "clip", text, 0.5)]


def _same_norm_of_other_part(view: View) -> Finding | None:
    """A norm of one rank's share alone, or of a rank's share counted twice, when ranks hold different parameters."""
    total = dot(view.truth.grads, view.truth.grads)
    if not view.mine.grad_norm or not view.truth.grad_norm or total == 0.0:
        return None
    share = (view.mine.grad_norm / view.truth.grad_norm) ** 2
    for name, grad in view.truth.grads.items():
        part = dot({name: grad}, {name: grad}) / total
        for count, word in ((1, "is counted twice"), (-1, "is left out")):
            if part > 1e-9 and abs(share - 1 - count * part) < 1e-7 * max(1.0, share):
                return Finding("norm", "clip", f"the gradient norm is wrong by one parameter: {name} {word}", 0.75, (name,))
    return None


def loss_alone(view: View, kinds: set[str]) -> list[Finding]:
    """The loss is wrong and the gradients are right: only what is reported is wrong."""
    if "loss" not in kinds or "grad" in kinds or not view.truth.loss:
        return []
    ratio = view.mine.loss / view.truth.loss
    axis, clause = view.facts.explain(ratio)
    text = f"the loss is {clause}" if ":" in clause else f"the loss is {view.mine.loss:.8g} instead of {view.truth.loss:.8g}"
    return [
        Finding(
            "loss-report",
            axis or "loss",
            f"{text}, while every gradient is right: the reported loss is not the global mean",
            0.8,
        )
    ]


def wrong_count(view: View, kinds: set[str]) -> list[Finding]:
    """The loss is divided by another number than there are unmasked targets."""
    if "count" not in kinds or not view.mine.count or not view.truth.count:
        return []
    mine, truth = view.mine.count, view.truth.count
    axis, clause = view.facts.explain(mine / truth)
    why = (
        f" ({clause})"
        if ":" in clause
        else ": samples are left out"
        if mine < truth
        else ": what is masked or padded is counted"
    )
    return [Finding("count", axis or "data", f"the step counts {mine:g} tokens or samples instead of {truth:g}{why}", 0.97)]


def global_scale(view: View) -> list[Finding]:
    """Every gradient is the same factor away."""
    fit = fit_scale(view.mine.grads, view.truth.grads)
    if not fit.holds(view.slack) or abs(fit.scale - 1) < view.slack or fit.scale == 0.0:
        return []
    axis, clause = view.facts.explain(fit.scale)
    return [Finding("scale", axis, f"every gradient is {clause}", 0.95 if axis else 0.8, view.wrong)]


def scale_by_parameter(view: View) -> list[Finding]:
    """Some parameters are a factor away each; those with one factor are reported together."""
    groups: dict[str, list[str]] = {}
    for name in view.wrong:
        fit = fit_scale(view.only(view.mine.grads, [name]), view.only(view.truth.grads, [name]))
        if fit.holds(view.slack) and fit.scale != 0.0 and abs(fit.scale - 1) > view.slack:
            groups.setdefault(f"{fit.scale:.5g}", []).append(name)
    found = []
    for factor, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        axis, clause = view.facts.explain(float(factor))
        if ":" in clause or len(names) > 1:
            found.append(Finding("scale-some", axis, f"the gradient of {list_names(names)} is {clause}", 0.65, tuple(names)))
    return found[:3]


def lacks_reduction(view: View) -> list[Finding]:
    """The ranks' own gradients differ, and their sum (or mean) along an axis is the right one."""
    for axis, lines in view.facts.lines.items():
        for word, divide in (("sum", False), ("mean", True)):
            solved = [name for name in view.wrong if _combined_matches(view, name, lines, divide)]
            if solved:
                which = "every wrong gradient" if len(solved) == len(view.wrong) else f"the gradient of {list_names(solved)}"
                text = f"{which} matches after a {word} over {axis}: a reduction is missing"
                return [Finding("missing-reduction", axis, text, 0.97, tuple(solved))]
    return []


def _combined_matches(view: View, name: str, lines: Sequence[tuple[int, ...]], divide: bool) -> bool:
    truth = view.truth.grads.get(name)
    if truth is None:
        return False
    complete = [line for line in lines if len(line) > 1 and all(name in _grads(view, rank) for rank in line)]
    for line in complete:
        parts = [_grads(view, rank)[name] for rank in line]
        own = [part for part in parts if part is not None]
        if not own or any(part.shape != truth.shape for part in own):
            return False
        total = sum(own[1:], own[0].double()) / (len(line) if divide else 1)
        if relative_error(total, truth, largest(view.truth.grads)) > view.slack:
            return False
    return bool(complete)


def _grads(view: View, rank: int) -> Gradients:
    seen = view.mine.ranks.get(rank)
    return seen.grads if seen else {}


def unsynchronised_copies(view: View) -> list[Finding]:
    """Copies of one parameter (tied weights) have gradients whose sum is the right one."""
    unknown = [grad for name, grad in view.mine.grads.items() if name not in view.truth.params and grad is not None]
    tied = []
    for name in view.wrong:
        truth, own = view.truth.grads.get(name), view.mine.grads.get(name)
        copies = [grad for seen in view.mine.ranks.values() if (grad := seen.grads.get(name)) is not None]
        pairs = [(own, other) for other in unknown if own is not None] + ([(copies[0], copies[1])] if len(copies) == 2 else [])
        for one, other in pairs:
            if truth is not None and one.shape == other.shape == truth.shape:
                error = relative_error(one + other, truth, largest(view.truth.grads))
                if error <= view.slack and name not in tied:
                    tied.append(name)
    if not tied or len(tied) == len([one for one in view.truth.grads.values() if one is not None]):
        return []
    text = f"the sum of the two copies of {list_names(tied)} is the right gradient: the tied weights are not synchronised"
    return [Finding("tied", "pp" if view.facts.sizes.get("pp", 1) > 1 else "tied", text, 0.98, tuple(tied))]


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
        text = "the gradient is that of the step before: it was not computed anew, or reduced too late"
    else:
        text = "the gradient of the step before is added to this one: gradients are not set to zero between steps"
    return [Finding("gradient-kept", "optimizer", f"{text} ({now:.4f} of this step, {old:.4f} of the one before)", 0.93)]


def stale_weights(view: View) -> list[Finding]:
    """It is the gradient of the weights before the last update."""
    fit = fit_scale(view.mine.grads, view.truth.stale_grads)
    if not view.truth.stale_grads or not fit.holds(view.slack) or abs(fit.scale - 1) > view.slack:
        return []
    text = "the gradient is that of the weights before the last update: stale parameters were used in the forward"
    return [Finding("stale-weights", "dp", text, 0.97)]


def clipped(view: View) -> list[Finding]:
    """The norm before clipping is right, and the gradients are one factor away: clipping itself is wrong."""
    mine, truth = view.mine.grad_norm, view.truth.grad_norm
    if mine is None or truth is None or relative_number(mine, truth) > view.slack:
        return []
    if dot(view.truth.grads, view.truth.grads) ** 0.5 > 0.999999 * truth:  # nothing was clipped
        return []
    fit = fit_scale(view.mine.grads, view.truth.grads)
    if not fit.holds(view.slack) or abs(fit.scale - 1) < view.slack:
        return []
    return [
        Finding("clip", "clip", f"the gradient norm is right and the clipped gradient is {fit.scale:.6f} times too large", 0.96)
    ]


def frozen_or_dead(view: View) -> list[Finding]:
    """Gradients that one side does not have."""
    found = []
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
            found.append(Finding(cause, "", f"{list_names(names)} {clause}", 0.75, tuple(names)))
    return found


def _zero(grads: Gradients, name: str) -> bool:
    grad = grads.get(name)
    return grad is None or not bool(grad.any())
