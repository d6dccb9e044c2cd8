"""What is measured here: a GPT of eight blocks, its batch, and the engine of a rank under a
plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait import models
from plait.comm import World
from plait.engine.build import Options, build, join_world
from plait.engine.engine import Engine
from plait.models.losses import cross_entropy
from plait.plan import Plan


@dataclass(frozen=True)
class Subject:
    """`num_samples` a step, over all ranks and micro-batches."""

    hidden_size: int
    seq_len: int
    num_samples: int

    @property
    def keys(self) -> dict[str, Any]:
        """Of the model, as a config has them."""
        return {
            "num_hidden_layers": 8,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.hidden_size // 16,
            "intermediate_size": 4 * self.hidden_size,
            "vocab_size": 256,
            "max_position_embeddings": 128,
        }

    def join(self, text: str) -> World:
        """The world of the ranks that were launched for a plan."""
        return join_world(Plan.parse(text))

    def engine(self, text: str, world: World) -> Engine:
        """This rank's."""
        with torch.device("meta"):
            model = models.make("gpt", **self.keys)
        return build(
            model,
            text,
            loss=cross_entropy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
            options=Options(),
            world=world,
        )

    def share(self, world: World) -> tuple[Tensor, Tensor]:
        """This data rank's part of the batch."""
        axis = world.axis("dp")
        tokens = torch.randint(
            0, 256, (self.num_samples, self.seq_len + 1), generator=torch.Generator().manual_seed(0)
        )
        own = tokens.tensor_split(axis.size)[axis.rank]
        return own[:, :-1], own[:, 1:]
