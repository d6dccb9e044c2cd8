"""Norms that gradients were clipped by, and what each is the norm of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.verify.diagnosis.finding import Finding
from plait.verify.record.observation import Gradients, Observation

SLACK = 1e-5


def norm_of_a_part(
    ranks: Sequence[Sequence[Observation]], truth: Sequence[Observation]
) -> list[Finding]:
    """The finding that all ranks clip by the norm of one rank's parameters, as of one stage."""
    for step, right in enumerate(truth):
        seen = {own[step].grad_norm for own in ranks} - {None}
        whole = _norm(right.grads)
        if len(seen) != 1 or not right.grad_norm or not whole:
            continue
        norm = seen.pop() or 0.0
        if abs(norm - right.grad_norm) <= SLACK * right.grad_norm:
            continue
        for rank, own in enumerate(ranks):
            held = own[step].grads
            part = _norm({name: grad for name, grad in right.grads.items() if name in held})
            part *= right.grad_norm / whole  # the reference's gradients are clipped already
            if abs(norm - part) <= SLACK * norm:
                text = (
                    f"every rank clips by {norm:.6g}, the norm of rank {rank}'s parameters alone; "
                    f"that of all is {right.grad_norm:.6g}"
                )
                return [Finding("norm", "clip", text, 0.98)]
    return []


def _norm(grads: Gradients) -> float:
    known = [grad for grad in grads.values() if grad is not None]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in known))
