"""A tiny GPT-2 of `transformers`, its data, and a rank as libraries of loops find it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 16,
    "n_head": 4,
    "vocab_size": 32,
    "n_positions": 12,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SAMPLES = 44  # five batches of 8, and a last one of 4


def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES))


def samples() -> list[dict[str, Tensor]]:
    """Rows of 8 tokens, of which the last ones of every third count for nothing."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index, tokens in enumerate(torch.randint(0, 32, (SAMPLES, 8), generator=generator)):
        labels = tokens.clone()
        if index % 3 == 0:
            labels[5:] = -100
        mask = (labels != -100).long()
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return rows


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """The variables by which Accelerate finds its world, and none of its earlier state."""
    from accelerate.state import AcceleratorState, GradientState

    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    kept = dict(os.environ)
    if size > 1:
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
        os.environ["OMP_NUM_THREADS"] = "1"  # every launcher sets it, and Accelerate warns without
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
