"""The models of the GPU tables, and their sizes on a processor for a trial of the script itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait import models


@dataclass(frozen=True)
class Subject:
    """A model and a batch."""

    title: str
    family: str
    keys: tuple[tuple[str, Any], ...]
    batch: int
    seq_len: int
    group: int = 5
    """Steps that are timed together."""
    rank: int = 0
    """Of the adapters; 0 trains everything."""

    def model(self, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with values, which are drawn on the device."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return models.make(self.family, **dict(self.keys))
        finally:
            torch.set_default_dtype(before)

    def tokens(self, device: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, seq_len]."""
        vocabulary = dict(self.keys)["vocab_size"]
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(0, vocabulary, (self.batch, self.seq_len + 1), generator=generator)
        return drawn[:, :-1].contiguous().to(device), drawn[:, 1:].contiguous().to(device)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_len

    def config(self) -> dict[str, Any]:
        """The tables that the cost model takes."""
        adapter = {"adapter": {"kind": "lora", "rank": self.rank}} if self.rank else {}
        return {
            "model": {"name": self.family, **dict(self.keys)},
            "data": {"seq_len": self.seq_len},
            "train": {"global_batch": self.batch},
            **adapter,
        }

    def flops(self, model: nn.Module) -> float:
        """Flops of a step: 6 for each weight of a product and token, and attention's causal half.

        Adapters are not counted: they do not serve the model that is trained.
        """
        weights = sum(
            module.weight.numel()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and "lora_" not in name
        )
        keys = dict(self.keys)
        attention = 6 * keys["num_hidden_layers"] * self.seq_len * keys["hidden_size"]
        return float((6 * weights + attention) * self.num_tokens)

    def with_keys(self, **keys: Any) -> Subject:
        """The subject with other sizes."""
        return replace(self, keys=tuple((dict(self.keys) | keys).items()))

    def shallow(self) -> Subject:
        """The subject with few layers and words: its blocks compile to the code of the whole."""
        return self.with_keys(num_hidden_layers=2, vocab_size=1024)

    def small(self) -> Subject:
        """The subject for a trial on a processor."""
        sizes = {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 128,
        }
        if "num_key_value_heads" in dict(self.keys):
            sizes["num_key_value_heads"] = 2
        return replace(self.with_keys(**sizes), batch=2, seq_len=16, group=2)


def _llama(layers: int, width: int, heads: int, inner: int, **more: Any) -> tuple[Any, ...]:
    keys = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        **more,
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
    Subject("GPT-2 124M", "gpt", tuple(GPT2.items()), 16, 1024, 10),
    Subject("Llama 1B", "llama", _llama(16, 2048, 32, 8192, tie_word_embeddings=True), 4, 2048),
    Subject("Llama 3B", "llama", _llama(28, 3072, 24, 8192, tie_word_embeddings=True), 1, 3072, 4),
)
SMALL = Subject(
    "GPT 12 x 256",
    "gpt",
    tuple({**GPT2, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 8192}.items()),
    16,
    128,
    20,
)
LORA = Subject("Llama 8B", "llama", _llama(32, 4096, 32, 14336), 1, 4096, 3, rank=16)
