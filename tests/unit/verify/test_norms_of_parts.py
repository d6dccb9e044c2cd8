"""A norm that is one of a rank's own parameters, while all ranks clip by it."""

from __future__ import annotations

import torch

from plait.verify.outside.norms import norm_of_a_part
from plait.verify.record.observation import Observation

GRADS = {"first": torch.tensor([0.3, 0.0]), "second": torch.tensor([0.4])}


def seen(name: str, norm: float | None) -> list[Observation]:
    return [Observation(0.0, {name: GRADS[name]}, {}, norm)]


def test_the_norm_of_one_stage_is_named() -> None:
    right = [Observation(0.0, GRADS, {}, 5.0)]  # clipped from a norm of 5 to 0.5
    found = norm_of_a_part([seen("first", 3.0), seen("second", 3.0)], right)
    assert [one.cause for one in found] == ["norm"]
    assert "every rank clips by 3, the norm of rank 0's parameters alone" in found[0].text


def test_a_right_norm_a_strange_one_and_none_are_not() -> None:
    right = [Observation(0.0, GRADS, {}, 5.0)]
    for norm in (5.0, 3.5, None):
        assert norm_of_a_part([seen("first", norm), seen("second", norm)], right) == []
    assert norm_of_a_part([seen("first", 3.0), seen("second", 4.0)], right) == []  # apart
