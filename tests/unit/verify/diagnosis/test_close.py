"""Coefficients are as close as the bound of the run's precision lets them be."""

from __future__ import annotations

import pytest
import torch

from plait.verify.diagnosis.contribution_findings import contribution_findings
from plait.verify.diagnosis.finding import Facts, reach
from plait.verify.record.observation import Contribution, Observation

FACTS = Facts({"mb": 2})


def cases() -> tuple[list[Contribution], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    parts = [
        Contribution(0, number, 4.0, {"w": torch.randn(40, generator=generator).double()})
        for number in range(2)
    ]
    noise = 0.004 * torch.randn(40, generator=generator).double()
    return parts, {"w": parts[1].grads["w"] + noise}


@pytest.mark.parametrize(("slack", "cause"), [(1e-6, []), (0.02, ["dropped"])])
def test_a_pattern_is_read_within_the_bound(slack: float, cause: list[str]) -> None:
    """Noise of bf16 hides no lost micro-batch where bf16 is what is asked for."""
    parts, grads = cases()
    whole = {"w": parts[0].grads["w"] + parts[1].grads["w"]}
    mine = Observation(1.0, grads, {})
    truth = Observation(1.0, whole, {}, contributions=parts)
    found = contribution_findings(mine, truth, FACTS, slack)
    assert [one.cause for one in found] == cause


def test_alike_contributions_reach_further() -> None:
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    other = torch.tensor([0.0, 1.0], dtype=torch.float64)
    near = torch.tensor([1.0, 0.1], dtype=torch.float64)
    value = {"w": first + other}
    apart = reach(value, [{"w": first}, {"w": other}])
    assert apart == pytest.approx(2**0.5)
    assert reach(value, [{"w": first}, {"w": near}]) > 5 * apart
