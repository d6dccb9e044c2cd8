"""Models in which packed documents would see each other are refused, by the name of the module."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from plait import models
from plait.engine.options import Options
from plait.engine.splitting import rehearse_documents
from plait.errors import ModelError
from tests.parity.hugging_face import EVEN, GPT2

MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 28, "state_size": 4}


@pytest.mark.parametrize(
    "config",
    [
        {**EVEN, "model_type": "llama", "max_position_embeddings": 64},
        {**EVEN, "model_type": "mistral", "sliding_window": 4, "max_position_embeddings": 64},
        {**GPT2, "model_type": "gpt2", "n_positions": 64, "attn_pdrop": 0.1},
        {**EVEN, "model_type": "mixtral", "num_local_experts": 4},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_attention_with_masks_of_documents_is_taken(config: dict[str, object]) -> None:
    rehearse_documents(models.make("hf", config=config), Options())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MAMBA, "model_type": "mamba"}, "this mamba computes attention by"),
        ({**EVEN, "model_type": "llama", "attn_implementation": "eager"}, "attention by 'eager'"),
        (
            {**EVEN, "model_type": "qwen3_next", "head_dim": 4, "linear_num_value_heads": 2,
             "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
             "num_experts": 2, "moe_intermediate_size": 8},
            "packed documents would see each other",
        ),
    ],
    ids=lambda value: str(value["model_type"]) if isinstance(value, dict) else "",
)  # fmt: skip
def test_other_ways_to_mix_positions_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rehearse_documents(models.make("hf", config=config), Options())


class Ignoring(nn.Module):
    """Attention that does not ask for documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks[1] = Attention()

    def forward(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Attention(nn.Module):
    """Causal attention of one head."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


def test_attention_without_a_mask_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'blocks.1' \(Attention\) takes no mask"):
        rehearse_documents(Ignoring(), Options(blocks="blocks.*"))
