"""Families of the shaped link alone: long sequences, and mixtures of experts, with torch's systems
beside them.

torch's `context_parallel` has tables for the attention kernels of CUDA alone. Its generic ring is
handed the kernel of the CPU, as in `benchmarks.expert.context`, inside DDP. For experts torch
itself has no exchange of tokens: its systems there keep all experts on every rank (DDP), or gather
them (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpt import adamw
from benchmarks.pipeline.systems import Case
from plait import models
from plait.comm import World

NUM_EXPERTS = 8
SEQUENCES = Case("long sequences", "4 layers x 256, batch 2 x 2048", 4, 256, 2048, 2)
TORCH_RING = "torch ring"


@dataclass(frozen=True)
class MixtureCase(Case):
    """A llama with a mixture of `NUM_EXPERTS` in each layer."""

    def model(self, device: str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return models.make(
                "llama",
                num_hidden_layers=self.num_hidden_layers,
                hidden_size=self.hidden_size,
                num_attention_heads=self.hidden_size // 64,
                intermediate_size=2 * self.hidden_size,
                num_local_experts=NUM_EXPERTS,
                num_experts_per_tok=2,
                moe_intermediate_size=2 * self.hidden_size,
                vocab_size=self.vocab_size,
                max_position_embeddings=self.seq_len,
            )


MIXTURE = MixtureCase(
    "experts",
    f"4 layers x 256, {NUM_EXPERTS} experts of 512 and 2 a token, batch 16 x 128",
    *(4, 256, 128, 16),
)


def torch_ring(case: Case, world: World) -> Callable[[], Any]:
    """torch's ring around every attention, and DDP over the same ranks.

    The parts of a sequence are those of its balanced ring: chunks r and 2N - 1 - r of rank r.
    """
    from benchmarks.expert.context import TorchRing

    made: Any = case.model()
    for block in made.blocks:
        block.attention.core = TorchRing()
    model = nn.parallel.DistributedDataParallel(made, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    chunks = torch.arange(case.seq_len).chunk(2 * world.size)
    places = torch.cat([chunks[world.rank], chunks[2 * world.size - 1 - world.rank]])
    inputs, targets = (part[:, places].contiguous() for part in case.batch())

    def step() -> float:
        logits = model(inputs, positions=places.expand_as(inputs))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
