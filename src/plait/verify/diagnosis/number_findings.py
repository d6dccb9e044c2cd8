"""Findings about a wrong number of the step: the loss, its divisor, the norm of the gradient,
clipping.
"""

from __future__ import annotations

from plait.errors import some_of
from plait.verify.diagnosis.finding import Finding, dot, fit_scale, fit_tensors
from plait.verify.diagnosis.view import View
from plait.verify.record.compare import relative_number


def norm_alone(view: View, kinds: set[str]) -> list[Finding]:
    """The gradients before clipping cannot be seen; their norm can."""
    if "grad_norm" not in kinds or view.mine.grad_norm is None or not view.truth.grad_norm:
        return []
    if view.mine.grad_norm == 0.0:
        text = "clipping saw no gradients: it comes before the backward, or has no parameters left"
        return [Finding("clip", "clip", text, 0.97)]
    ratio = view.mine.grad_norm / view.truth.grad_norm
    if "grad" in kinds and not fit_scale(view.mine.grads, view.truth.grads).holds(view.slack):
        return []
    axis, clause = view.facts.explain(ratio**2)
    if ":" in clause and abs(ratio**2 - 1) > 1e-3:
        text = (
            f"the square of the gradient norm is {clause}: parts of it are counted more than once, "
            f"or left out{_scaled_before(view, ratio)}"
        )
        return [Finding("norm", axis, text, 0.85)]
    other = _norm_of_replicas(view) or _norm_of_one_parameter(view)
    if other:
        return [other]
    text = f"the gradient norm is {view.mine.grad_norm:.10g} instead of {view.truth.grad_norm:.10g}"
    return [Finding("norm", "clip", text, 0.5)]


def _scaled_before(view: View, ratio: float) -> str:
    """The other cause of a wrong norm: clipping hides a factor that all gradients had."""
    clause = view.facts.explain(ratio)[1]
    return f"; or clipping hides that all gradients were {clause}" if ":" in clause else ""


def norm_of_one_rank(view: View, kinds: set[str]) -> list[Finding]:
    """The norm of one rank's shard of the right gradient, instead of all shards'."""
    total = dot(view.truth.grads, view.truth.grads) ** 0.5
    if (
        "grad_norm" not in kinds
        or not view.mine.grad_norm
        or not view.truth.grad_norm
        or total == 0.0
    ):
        return []
    for rank, shard in enumerate(view.mine.shards):
        part = {
            name: g.flatten()[i:j]
            for name, (i, j) in shard.items()
            if (g := view.truth.grads.get(name)) is not None
        }
        norm = dot(part, part) ** 0.5 * view.truth.grad_norm / total
        if relative_number(view.mine.grad_norm, norm) <= view.slack:
            stages = view.facts.sizes.get("dp", 1) == 1 and view.facts.sizes.get("pp", 1) > 1
            axis = "pp" if stages else "dp"
            text = (
                f"the gradient norm is that of rank {rank}'s shard alone: its sum over {axis} is "
                "missing"
            )
            return [Finding("norm", axis, text, 0.96)]
    return []


def _num_holders(view: View, name: str) -> int:
    """The ranks that have a gradient of a parameter."""
    grads = [seen.grads.get(name) for seen in view.mine.ranks.values()]
    return sum(grad is not None for grad in grads)


def _norm_of_replicas(view: View) -> Finding | None:
    """A norm that counts parameters once for every rank that holds a copy."""
    total = dot(view.truth.grads, view.truth.grads)
    if not view.mine.grad_norm or not view.truth.grad_norm or total == 0.0:
        return None
    holders = {name: _num_holders(view, name) for name in view.truth.grads}
    size = max(holders.values(), default=0)
    copied = {
        name: grad
        for name, grad in view.truth.grads.items()
        if holders[name] == size and grad is not None
    }
    share = (view.mine.grad_norm / view.truth.grad_norm) ** 2 - 1
    part = dot(copied, copied) / total * (size - 1)
    if size < 2 or len(copied) == len(view.truth.grads) or abs(share - part) > 1e-7 * abs(share):
        return None
    names = tuple(copied)
    text = (
        f"the gradient norm counts {some_of(names)} {size} times, once for every rank that has "
        "a copy"
    )
    return Finding("norm", "tp", text, 0.96, names)


def _norm_of_one_parameter(view: View) -> Finding | None:
    """A norm of one rank's share alone, or of a rank's share counted twice, when ranks hold
    different parameters.
    """
    total = dot(view.truth.grads, view.truth.grads)
    if not view.mine.grad_norm or not view.truth.grad_norm or total == 0.0:
        return None
    share = (view.mine.grad_norm / view.truth.grad_norm) ** 2
    for name, grad in view.truth.grads.items():
        part = dot({name: grad}, {name: grad}) / total
        for count, word in ((1, "is counted twice"), (-1, "is left out")):
            if part > 1e-9 and abs(share - 1 - count * part) < 1e-7 * max(1.0, share):
                return Finding(
                    "norm",
                    "clip",
                    f"the gradient norm is wrong by one parameter: {name} {word}",
                    0.75,
                    (name,),
                )
    return None


def loss_alone(view: View, kinds: set[str]) -> list[Finding]:
    """The loss is wrong and the gradients are right: only what is reported is wrong."""
    if "loss" not in kinds or "grad" in kinds or not view.truth.loss:
        return []
    ratio = view.mine.loss / view.truth.loss
    axis, clause = view.facts.explain(ratio)
    text = (
        f"the loss is {clause}"
        if ":" in clause
        else f"the loss is {view.mine.loss:.8g} instead of {view.truth.loss:.8g}"
    )
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
    counted = view.mine.count
    truth = view.truth.count
    axis, clause = view.facts.explain(counted / truth)
    why = (
        f" ({clause})"
        if ":" in clause
        else ": samples are left out"
        if counted < truth
        else ": what is masked or padded is counted"
    )
    return [
        Finding(
            "count",
            axis or "data",
            f"the step counts {counted:g} tokens or samples instead of {truth:g}{why}",
            0.97,
        )
    ]


def clipped(view: View) -> list[Finding]:
    """The norm before clipping is right, and the gradients are one factor away: clipping itself is
    wrong.
    """
    mine = view.mine.grad_norm
    truth = view.truth.grad_norm
    if mine is None or truth is None or relative_number(mine, truth) > view.slack:
        return []
    if dot(view.truth.grads, view.truth.grads) ** 0.5 > 0.999999 * truth:  # nothing was clipped
        return []
    fit = fit_scale(view.mine.grads, view.truth.grads)
    if not fit.holds(view.slack):
        return _clipped_apart(view)
    if abs(fit.scale - 1) < view.slack:
        return []
    return [
        Finding(
            "clip",
            "clip",
            f"the gradient norm is right and the clipped gradient is {fit.scale:.6f} times too "
            "large",
            0.96,
        )
    ]


def _clipped_apart(view: View) -> list[Finding]:
    """Each gradient is the right one times a factor of its own, or its elements are cut off."""
    pairs = [
        (grad, right)
        for name, right in view.truth.grads.items()
        if right is not None and (grad := view.mine.grads.get(name)) is not None
    ]
    if len(pairs) < 2 or any(grad.shape != right.shape for grad, right in pairs):
        return []
    least = 1e-8 * max(float(right.norm()) for _, right in pairs)
    known = [(grad.double(), right.double()) for grad, right in pairs if right.norm() > least]
    if all(fit_tensors(grad, right).holds(view.slack) for grad, right in known):
        text = "every tensor, or group of them, is clipped by a norm of its own"
        return [Finding("clip", "clip", text, 0.95)]
    most = max(float(grad.abs().max()) for grad, _ in pairs)
    total = sum(grad.numel() for grad, _ in pairs)
    cut = sum(int((grad.abs() >= most * (1 - 1e-9)).sum()) for grad, _ in pairs)
    if cut > max(2, total // 100):
        text = f"{cut} of {total} elements are cut off at {most:.6g}: clipped by value, not by norm"
        return [Finding("clip", "clip", text, 0.9)]
    return []
