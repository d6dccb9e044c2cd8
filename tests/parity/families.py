"""The model families of the parity tests: each with its loss, its data and what its samples see of
each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait import models
from tests.parity.generator import odd

STEPS = 3


@dataclass(frozen=True)
class Family:
    """A model family: its factory keys, its loss, its data, and whether samples of a slice see each
    other.
    """

    name: str
    keys: dict[str, Any]
    sample: tuple[int, ...]
    classes: int
    tokens: bool = False
    by_slice: bool = False
    by_micro_batch: bool = False  # a loss of its own, of all slices of a micro-batch together
    frozen: tuple[str, ...] = ()  # patterns of parameters that do not train
    num_steps: int = STEPS

    def model(self) -> nn.Module:
        """On the meta device."""
        make = odd.Odd if self.name == "odd" else functools.partial(models.make, self.name)
        with torch.device("meta"):
            model: nn.Module = make(**self.keys)
        for name, param in model.named_parameters():
            param.requires_grad_(not any(models.match(pattern, name) for pattern in self.frozen))
        return model

    def batches(self, num_samples: int) -> list[tuple[Tensor, Tensor]]:
        """The same global batches in every process; some targets are masked, unevenly, where
        targets are tokens.
        """
        generator = torch.Generator().manual_seed(7)
        return [self._batch(num_samples, generator) for _ in range(self.num_steps)]

    def _batch(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not self.tokens:
            inputs = torch.randn(
                num_samples, *self.sample, generator=generator, dtype=torch.float64
            )
            return inputs, torch.randint(0, self.classes, (num_samples,), generator=generator)
        tokens = torch.randint(
            0, self.classes, (num_samples, self.sample[0] + 1), generator=generator
        )
        targets = tokens[:, 1:].clone()
        share = torch.linspace(0, 0.9, num_samples)[:, None]
        targets[torch.rand(targets.shape, generator=generator) < share] = -100
        return tokens[:, :-1], targets


RESNET = {"depth": 18, "num_classes": 7, "in_channels": 2, "width": 4}

FAMILIES = {
    "mlp": Family(
        "mlp",
        {"in_features": 6, "hidden_size": 11, "num_hidden_layers": 2, "out_features": 5},
        (6,),
        5,
    ),
    "gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "vocab_size": 29,
            "max_position_embeddings": 12,
            "tie_word_embeddings": True,
        },
        (9,),
        29,
        tokens=True,
    ),
    "llama": Family(
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 22,
            "vocab_size": 31,
            "max_position_embeddings": 12,
        },
        (7,),
        31,
        tokens=True,
    ),
    "resnet": Family("resnet", RESNET, (2, 16, 16), 7),
    # Statistics of batch-norm are those of a micro-batch on a rank, as in torch DDP: one device
    # takes the same slices.
    # The images are large enough for four elements a statistic: over one or two, batch-norm divides
    # rounding by almost nothing.
    "resnet-batch": Family(
        "resnet", {**RESNET, "norm": "batch", "width": 2}, (2, 64, 64), 7, by_slice=True
    ),
}


# Sizes that grids of 2 x 2 and 2 x 2 x 2 divide, and 1D over 2 and 4. Batch (12), sequence, hidden,
# heads and vocabulary
# all differ.
SPLIT_FAMILIES = {
    "mlp": Family(
        "mlp",
        {"in_features": 20, "hidden_size": 16, "num_hidden_layers": 4, "out_features": 5},
        (20,),
        5,
    ),
    "gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "vocab_size": 44,
            "max_position_embeddings": 17,
            "tie_word_embeddings": True,
        },
        (8,),
        44,
        tokens=True,
    ),
    "llama": Family(
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "intermediate_size": 36,
            "vocab_size": 28,
            "max_position_embeddings": 32,
        },
        (16,),
        28,
        tokens=True,
    ),
}


TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "vocab_size": 28,
    "intermediate_size": 36,
    "max_position_embeddings": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "vocab_size": 44,
    "n_positions": 17,
    "n_inner": 40,
}
GPT2 |= {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HUGGING_FACE = {
    "hf-llama": {
        **TINY,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
    },
    "hf-gpt2": GPT2,
    "hf-qwen2": {
        **TINY,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 3,
    },
}
SPLIT_FAMILIES |= {
    name: Family("hf", {"config": config}, (8,), int(str(config["vocab_size"])), tokens=True)
    for name, config in HUGGING_FACE.items()
}


# Its masks depend on the slice, so one device takes the same slices.
DROPPED = {
    "split-gpt-dropout": Family(
        "gpt", {**SPLIT_FAMILIES["gpt"].keys, "dropout": 0.3}, (8,), 44, tokens=True, by_slice=True
    )
}

# Enough layers for eight stages, and small ones: what pipelines are proven on.
DEEP = {
    "mlp-deep": Family("mlp", {**FAMILIES["mlp"].keys, "num_hidden_layers": 7}, (6,), 5),
    "gpt-deep": Family(
        "gpt",
        {**FAMILIES["gpt"].keys, "num_hidden_layers": 4, "hidden_size": 8},
        (9,),
        29,
        tokens=True,
    ),
    "llama-deep": Family(
        "llama",
        {**FAMILIES["llama"].keys, "num_hidden_layers": 5, "hidden_size": 8},
        (7,),
        31,
        tokens=True,
    ),
    "resnet": FAMILIES["resnet"],
}


# A sequence that 2 and 4 ranks cut in zig-zag order, heads and experts that 4 ranks share.
LONG = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 32,
    "max_position_embeddings": 16,
}
MIXTRAL = {**LONG, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **LONG,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced": {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.02},
    "by-sequence": {
        "router_aux_loss_coef": 0.1,
        "seq_aux": True,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
    },
    "bias": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "router_bias_update_speed": 0.05,
    },
    "groups": {"n_group": 2, "topk_group": 1, "router_aux_loss_coef": 0.05},
    "drop": {"capacity_factor": 0.6, "router_aux_loss_coef": 0.05},
    "drop-position": {"capacity_factor": 0.9, "drop_policy": "position"},
    "noisy": {"topk_method": "noisy", "router_aux_loss_coef": 0.1, "seq_aux": True},
    "expert-choice": {"topk_method": "expert_choice", "router_z_loss_coef": 0.02},
}


def _experts(kind: str, base: dict[str, Any], router: str) -> Family:
    keys = {**base, **ROUTERS[router]}
    if kind == "deepseek" and "n_group" in keys:
        keys["topk_group"] = 1
    random = router == "noisy"
    return Family("llama", keys, (8,), 32, tokens=True, by_slice=random, by_micro_batch=not random)


EXPERT_FAMILIES = {
    f"{kind}-{router}": _experts(kind, base, router)
    for kind, base in (("mixtral", MIXTRAL), ("deepseek", DEEPSEEK))
    for router in ROUTERS
}
LONG_FAMILIES = {
    "long-llama": Family("llama", LONG, (16,), 32, tokens=True),
    "long-gpt": Family(
        "gpt", {k: v for k, v in LONG.items() if k != "num_key_value_heads"}, (16,), 32, tokens=True
    ),
}


def family_of(name: str | Family) -> Family:
    """A family by its name in any table; those of `SPLIT_FAMILIES` are called split-NAME. A family
    is itself.
    """
    if isinstance(name, Family):
        return name
    if name.startswith("hf-"):
        from tests.parity.hugging_face import HUGGING_FACE

        return HUGGING_FACE[name]
    if name.startswith(("more-", "wide-", "three-")):
        from tests.parity.wide import WIDE

        return WIDE[name]
    return {
        **DEEP,
        **DROPPED,
        **FAMILIES,
        **EXPERT_FAMILIES,
        **LONG_FAMILIES,
        **{f"split-{key}": family for key, family in SPLIT_FAMILIES.items()},
    }[name]
