"""Synchronised batch norms on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.verify.reference.one_device import pooled_losses, slicing_reasons

BATCH = (torch.randn(6, 3), torch.zeros(6))


def test_slices_of_a_micro_batch_belong_together() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    assert slicing_reasons(model, BATCH) == []
    assert "SyncBatchNorm" in pooled_losses(model)[0]


def test_beside_a_plain_one_slices_are_those_of_ranks() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4))
    assert "batch-norm" in slicing_reasons(model, BATCH)[0]


def test_dropout_beside_them_has_no_meaning() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Dropout(0.5))
    with pytest.raises(ModelError, match="dropout 0"):
        slicing_reasons(model, BATCH)
