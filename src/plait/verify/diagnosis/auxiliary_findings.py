"""Findings about what has no part in the loss of the output: auxiliary losses, and buffers."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import some_of
from plait.verify.diagnosis.finding import Finding, coefficients
from plait.verify.diagnosis.view import View
from plait.verify.record.observation import Gradients


def auxiliary_loss(view: View) -> list[Finding]:
    """An auxiliary loss, such as that which balances experts, counts another number of times."""
    besides = view.truth.auxiliary
    if not besides:
        return []
    plain: Gradients = {
        name: grad if grad is None or (part := besides.get(name)) is None else grad - part
        for name, grad in view.truth.grads.items()
    }
    fitted = coefficients(view.mine.grads, [plain, besides])
    if fitted is None or fitted[1] > view.slack or abs(fitted[0][0] - 1) > view.slack:
        return []
    times = fitted[0][1]
    if abs(times - 1) <= view.slack:
        return []
    if abs(times) <= view.slack:
        axis, clause = "", "left out"
    else:
        axis, clause = view.facts.explain(times)
    text = f"the gradient of the auxiliary loss is {clause}, and that of the loss itself is right"
    return [Finding("auxiliary-loss", axis or "experts", text, 0.97, tuple(besides))]


def buffer_findings(names: Sequence[str]) -> list[Finding]:
    """Only buffers differ."""
    text = (
        f"gradients and weights are right, and the buffers {some_of(names)} are not: what "
        "updates them sees other tokens, or sees them twice"
    )
    return [Finding("buffers", "", text, 0.9, tuple(names))]
