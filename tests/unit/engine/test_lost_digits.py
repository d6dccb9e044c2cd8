"""A model in float64 under a plan in float32 is told of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import plait


def build(plan: str, dtype: torch.dtype) -> plait.Engine:
    return plait.build(
        nn.Linear(2, 1, dtype=dtype),
        plan,
        loss=lambda output, targets: (output - targets).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def test_a_model_in_float64_under_a_plan_in_float32_is_told():
    sentence = (
        r"the parameters are in float64, and 'dp1' computes in float32: add precision:float64"
    )
    with pytest.warns(UserWarning, match=sentence):
        build("dp1", torch.float64)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("dp1 precision:float64", torch.float64),
        ("dp1 precision:bf16", torch.float64),
        ("dp1 precision:float32", torch.float64),
        ("dp1", torch.float32),
        ("dp1", torch.bfloat16),
    ],
)
def test_a_precision_that_keeps_or_names_the_digits_is_not(plan: str, dtype: torch.dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(plan, dtype)
