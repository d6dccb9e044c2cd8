"""Small problems for the proof and for the faults that it must find."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from plait.config import Train
from plait.verify.problem import Problem

GPT = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 29,
    "max_position_embeddings": 12,
}
MLP = {
    "name": "mlp",
    "in_features": 6,
    "hidden_size": 11,
    "num_hidden_layers": 2,
    "out_features": 5,
}
LLAMA = {**GPT, "name": "llama", "num_key_value_heads": 2}
RESNET = {"name": "resnet", "depth": 18, "num_classes": 7, "in_channels": 2, "width": 4}
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "mlp": MLP,
    "llama": LLAMA,
    "resnet": RESNET,
    "fno": {"name": "fno", "hidden_size": 6, "num_hidden_layers": 2, "modes": 3, "in_channels": 2},
    "even": {**GPT, "vocab_size": 32},
    "experts": EXPERTS,
    "placed": EXPERTS,
    "batch-norm": {**RESNET, "norm": "batch"},
}


def loss_in_float32(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy as many users write it."""
    logits = output.flatten(0, 1).float()
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def train(**keys: Any) -> Train:
    defaults = {
        "optimizer": "adamw",
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "schedule": "constant",
        "steps": 3,
        "warmup_steps": 0,
        "min_lr": 0.0,
        "global_batch": 12,
        "clip_grad_norm": None,
        "seed": 3,
    }
    return Train(**{**defaults, **keys})


def problem(model: str = "gpt", **keys: Any) -> Problem:
    seq_len = 8 if model == "even" else 7
    if model == "placed":
        keys = {"place_experts_every": 4, "spare_expert_slots": 1, **keys}
    return Problem(
        MODELS[model], {"name": "random", "seq_len": seq_len, "image_size": 16}, train(**keys)
    )
