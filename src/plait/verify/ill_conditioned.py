"""Training that is ill-conditioned: what passes where one last bit comes near to the tolerance.

One device is run again from weights one bit aside. Some number may then move by more than a
thirtieth of what passes. So bounds by perturbation (`reference.rounding`) hold there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from plait.verify.diagnosis.finding import Finding
from plait.verify.record.compare import TOLERANCE, Key, differences
from plait.verify.record.observation import Record
from plait.verify.reference.copied import copied
from plait.verify.reference.rounding import FACTOR
from plait.verify.report import Report

CONDITIONED = 30.0  # times below the tolerance, where one bit aside moves a well-conditioned run
MOST = TOLERANCE[torch.float32]  # a bound above this proves nothing: the answer stays no


def may_pass(report: Report, moved: Record, reference: Record) -> bool:
    """Whether perturbed runs may let the errors pass.

    One device that starts one bit aside comes near to the tolerance, and no error is above the
    largest bound.
    """
    drift = max((one.error for one in differences(moved, reference)), default=0.0)
    furthest = max(one.error for one in report.failed)
    return drift * CONDITIONED > report.tolerance and furthest <= _most(report)


def _most(report: Report) -> float:
    return max(MOST, report.tolerance)


def wider(report: Report, found: Mapping[Key, float]) -> dict[Key, float]:
    """The bounds above those of a report, up to `MOST`."""
    passes = {one.key: report.limit_of(one) for one in report.differences}
    most = _most(report)
    return {
        key: min(limit, most)
        for key, limit in found.items()
        if key in passes and passes[key] < min(limit, most)
    }


def note(limits: Mapping[Key, float]) -> str:
    """The sentence of a report about the bounds."""
    widest = max(limits.values(), default=0.0)
    return (
        "this training is ill-conditioned: numbers may differ by "
        f"{FACTOR:g} times what the last place does to one device, at most {widest:.1e}"
    )


def nudged(model: nn.Module) -> nn.Module:
    """A copy whose weights differ in about their last bit."""
    moved = copied(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * noise)
    return moved


def rounding_alone(report: Report, moved: Record, reference: Record) -> list[Finding]:
    """Whether the difference is what rounding alone grows to: one device against itself, started
    one bit aside.
    """
    drift = {(one.step, one.kind, one.name): one.error for one in differences(moved, reference)}
    explained = [
        one
        for one in report.failed
        if one.error <= 30 * drift.get((one.step, one.kind, one.name), 0.0)
    ]
    if len(explained) < len(report.failed):
        return []
    worst = max(drift.values())
    text = (
        "rounding alone explains it: one device against itself, started one bit aside, drifts as "
        f"far (up to {worst:.1e}); "
        "this training is ill-conditioned, choose a lower lr, a larger batch or fewer steps"
    )
    return [Finding("rounding", "", text, 0.99)]
