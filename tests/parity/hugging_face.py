"""Tiny Hugging Face models as families of the parity table: as they are, with an initialisation of
each module alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.families import Family

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 29,
    "max_position_embeddings": 12,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EVEN = {**GROUPED, "vocab_size": 28}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 16,
    "n_head": 4,
    "vocab_size": 29,
    "n_positions": 12,
}
GPT2 |= {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 29,
    "dropout_rate": 0.0,
}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}


class Logits(nn.Module):
    """A model whose output has logits, called with token numbers alone; an encoder-decoder decodes
    them backwards.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.decodes = bool(model.config.is_encoder_decoder)  # type: ignore[union-attr]
        for module in model.modules():
            if module._parameters or module._buffers:
                module.reset_parameters = functools.partial(model._init_weights, module)  # type: ignore[operator, assignment]

    def forward(self, input_ids: Tensor) -> Tensor:
        more: dict[str, Any] = (
            {"decoder_input_ids": input_ids.flip(1), "use_cache": False} if self.decodes else {}
        )
        return self.model(input_ids=input_ids, **more).logits


@dataclass(frozen=True)
class Wrapped(Family):
    """A family whose model transformers makes from a class and a config."""

    def model(self) -> nn.Module:
        import transformers

        kind, _, config = self.name.partition(":")
        with torch.device("meta"):
            return Logits(getattr(transformers, kind)(getattr(transformers, config)(**self.keys)))


def causal(**config: Any) -> Family:
    return Family("hf", {"config": config}, (8,), int(config.get("vocab_size", 29)), tokens=True)


HUGGING_FACE = {
    "hf-gpt2": causal(**GPT2),
    "hf-llama": causal(model_type="llama", **GROUPED),
    "hf-llama-tied": causal(model_type="llama", tie_word_embeddings=True, **GROUPED),
    "hf-qwen2": causal(model_type="qwen2", **GROUPED),
    # Its norms round to float32, so that the size of a slice shows in the seventh digit: one device
    # takes the same slices.
    "hf-gemma2": replace(
        causal(model_type="gemma2", head_dim=4, sliding_window=4, **GROUPED), by_slice=True
    ),
    "hf-mixtral": causal(
        model_type="mixtral", num_local_experts=4, experts_implementation="eager", **GROUPED
    ),
    "hf-mixtral-default": causal(model_type="mixtral", num_local_experts=4, **EVEN),
    "hf-qwen2-moe": causal(
        model_type="qwen2_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        **EVEN,
    ),
    "hf-gpt-neox": causal(model_type="gpt_neox", **SMALL),
    "hf-bert": Wrapped("BertForMaskedLM:BertConfig", BERT, (8,), 29, tokens=True),
    "hf-t5": Wrapped("T5ForConditionalGeneration:T5Config", T5, (8,), 29, tokens=True),
}
