"""Synchronised batch norms on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from plait.errors import ModelError
from plait.verify.reference.one_device import pooled_losses, slicing_reasons

BATCH = (torch.randn(6, 3), torch.zeros(6))


def test_slices_of_a_micro_batch_belong_together() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    assert slicing_reasons(model, BATCH) == []
    assert "SyncBatchNorm" in pooled_losses(model)[0]


def test_beside_an_instance_norm_they_belong_together() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.InstanceNorm1d(3))
    assert slicing_reasons(model, (torch.randn(6, 3, 4), torch.zeros(6))) == []
    assert "SyncBatchNorm" in pooled_losses(model)[0]


def test_norms_without_running_statistics_belong_together() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4, track_running_stats=False))
    assert slicing_reasons(model, BATCH) == []


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (lambda: nn.BatchNorm1d(4), "batch-norm"),
        (lambda: nn.Dropout(0.5), "dropout"),
        (lambda: spectral_norm(nn.Linear(4, 4)), "random|buffers change"),
    ],
)
def test_what_slices_of_ranks_compute_has_no_meaning_beside_them(
    beside: Callable[[], nn.Module], reason: str
) -> None:
    """The iteration of a spectral norm has ended for some values, and moves no buffer then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), beside())
    with pytest.raises(ModelError, match=f"({reason}).*dropout 0.*convert_sync_batchnorm"):
        slicing_reasons(model, BATCH)
