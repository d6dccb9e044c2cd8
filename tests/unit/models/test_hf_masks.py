"""What a library does with masks while a CUDA graph is recorded, without a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils
from transformers.utils import import_utils

from plait.models import hf_masks
from plait.models.hf_masks import in_one_piece


def test_a_mask_that_nobody_gave_is_none_while_a_graphis_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is given may not be read then, which the library goes on to respect."""
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    monkeypatch.setattr(hf_masks, "is_recorded", lambda: True)
    with in_one_piece():
        assert not masking_utils.is_tracing(None)
        assert masking_utils.is_tracing(torch.ones(1, 2))
    assert masking_utils.is_tracing(None)


def test_what_else_traces_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_torchdynamo_compiling", lambda: True)
    with in_one_piece():
        assert masking_utils.is_tracing(None)
