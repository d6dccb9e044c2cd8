"""From two records and the numbers of a run to findings, surest first.

Later steps inherit the errors of earlier ones, so only the first wrong step is examined. Within it
the first wrong moment counts: start, then loss and gradients, then the update. Each question is one
small function in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.verify.diagnosis.auxiliary_findings import buffer_findings
from plait.verify.diagnosis.data_findings import data_findings
from plait.verify.diagnosis.finding import Facts, Finding
from plait.verify.diagnosis.gradient_findings import gradient_findings
from plait.verify.diagnosis.update_findings import replica_findings, start_findings, update_findings
from plait.verify.diagnosis.view import View
from plait.verify.record.compare import EVERY_GRADIENT, EVERY_PARAMETER, Difference
from plait.verify.record.observation import Record


def diagnose(
    parallel: Record,
    reference: Record,
    failed: Sequence[Difference],
    facts: Facts,
    tolerance: float,
    *,
    slack: float | None = None,
) -> list[Finding]:
    """The findings for the comparisons that `failed`; empty when none did, and one that says so
    when nothing is recognised.
    """
    if not failed or not parallel.steps:
        return []
    step = min(one.step for one in failed)
    now = [one for one in failed if one.step == step]
    kinds = {"grad" if one.kind == "scale" else one.kind for one in now}
    view = View(
        parallel.steps[step],
        reference.steps[step],
        parallel.steps[step - 1] if step else None,
        reference.steps[step - 1] if step else None,
        facts,
        slack=max(1e-6, 100 * tolerance) if slack is None else slack,
        wrong=_names(now, "grad", "scale"),
        tolerance=tolerance,
        before=reference.before(step),
    )
    findings: list[Finding] = []
    if "start" in kinds:
        findings += start_findings(
            parallel, reference, [one.name for one in now if one.kind == "start"]
        )
    if all(one.cause == "missing-parameters" for one in findings):
        if kinds & {"loss", "count", "grad", "grad_norm"}:
            findings += data_findings(view)
            findings += gradient_findings(view, kinds)
        if "replica" in kinds:
            findings += replica_findings(view, [one for one in now if one.kind == "replica"])
        if "grad" not in kinds and kinds & {"param", "update"}:
            wrong = _names(now, "param", "update")
            findings += update_findings(
                view, parallel.before(step), reference.before(step), wrong, step
            )
        if kinds == {"buffer"}:
            findings += buffer_findings(_names(now, "buffer"))
    if not findings:
        worst = max(now, key=lambda one: one.error)
        findings = [
            Finding(
                "unrecognised",
                "",
                f"{worst.kind} {worst.name} differs by {worst.error:.3g} from step {step} on",
                0.1,
            )
        ]
    return sorted(findings, key=lambda one: -one.confidence)


def _names(failed: Sequence[Difference], *kinds: str) -> tuple[str, ...]:
    """The tensors that failed in one of these ways."""
    together = (EVERY_GRADIENT, EVERY_PARAMETER)
    names = (one.name for one in failed if one.kind in kinds and one.name not in together)
    return tuple(dict.fromkeys(names))
