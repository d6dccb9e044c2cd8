"""The models of the GPU tables, and their sizes on a processor for a trial of the script itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait import models


@dataclass(frozen=True)
class Subject:
    """A model, a batch, and whether only adapters of the model train."""

    title: str
    family: str
    keys: tuple[tuple[str, Any], ...]
    batch: int
    seq_len: int
    rank: int = 0
    """Of the adapters; 0 trains everything."""

    def model(self, device: str) -> nn.Module:
        """The model with values, on a device; parameters in float32."""
        torch.manual_seed(0)
        with torch.device(device):
            return models.make(self.family, **dict(self.keys))

    def tokens(self, device: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, seq_len]."""
        vocabulary = dict(self.keys)["vocab_size"]
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(0, vocabulary, (self.batch, self.seq_len + 1), generator=generator)
        return drawn[:, :-1].contiguous().to(device), drawn[:, 1:].contiguous().to(device)

    def config(self) -> dict[str, Any]:
        """The tables that the cost model takes."""
        return {
            "model": {"name": self.family, **dict(self.keys)},
            "data": {"seq_len": self.seq_len},
            "train": {"global_batch": self.batch},
        }

    def small(self) -> Subject:
        """The subject for a trial on a processor."""
        keys = dict(self.keys) | {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 128,
        }
        if "num_key_value_heads" in keys:
            keys["num_key_value_heads"] = 2
        return replace(self, keys=tuple(keys.items()), batch=2, seq_len=16)


def _llama(layers: int, width: int, heads: int, kv_heads: int, inner: int) -> tuple[Any, ...]:
    keys = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
    }
    return tuple(keys.items())


GPT2 = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 50304,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SUBJECTS = (
    Subject("GPT-2 124M", "gpt", tuple(GPT2.items()), 16, 1024),
    Subject("Llama 1B", "llama", _llama(16, 2048, 32, 8, 8192), 4, 2048),
    Subject("Llama 3B", "llama", _llama(28, 3072, 24, 8, 8192), 2, 2048),
)
