"""Llama: a decoder with RMS norms, rotary positions, grouped key-value heads and a gated MLP, or a
mixture of experts.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", section 2.2; Ainslie et al.,
"GQA", section 2.2. Heads are counted from the tensors at hand, so a shard of the heads runs through
the same code. Names and the order of rotary halves are those of Hugging Face, so its weights can be
copied. Shapes: B samples, S positions, D hidden size, H heads, G key-value heads, K head size, V
vocabulary.
"""

from __future__ import annotations

import inspect
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.experts import Experts, MixtureOfExperts
from plait.models.layers import CausalAttention, Embedding, Linear, check_divides, check_positive
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router
from plait.values import JsonObject

BLOCKS = "blocks.*"
CHAIN = ("embed", BLOCKS, "norm", "head")
ROLES = {
    "embed": "embedding",
    "blocks.*.norm1": "norm",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.k": "column",
    "blocks.*.attention.v": "column",
    "blocks.*.attention.rotary": "position",
    "blocks.*.attention.core": "attention",
    "blocks.*.attention.o": "row",
    "blocks.*.norm2": "norm",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.mlp.router": "router",
    "blocks.*.mlp.experts": "experts",
    "blocks.*.mlp.shared.gate": "column",
    "blocks.*.mlp.shared.up": "column",
    "blocks.*.mlp.shared.down": "row",
    "norm": "norm",
    "head": "head",
}


class Rotary(nn.Module):
    """Turns each pair of a head's features by an angle proportional to the position: [B, H, S, K]
    -> [B, H, S, K].

    Su et al., "RoFormer", section 3.4.2. The angles are computed when used. They cost S K / 2
    cosines, and a table would be a buffer to place, to slice and to keep in float32.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [B, H, S, K] and k [B, G, S, K], turned. `positions` [S] are the places of this slice
        in the whole sequence; by default 0 .. S-1. Those of packed documents are [B, S].
        """
        if positions is None:
            positions = torch.arange(q.shape[-2], device=q.device)
        exponents = (
            torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        )
        angles = positions.float()[..., None] * (1.0 / self.theta**exponents)
        if positions.dim() > 1:
            angles = angles[:, None]  # alike for all heads
        cos = angles.cos().to(q.dtype)
        sin = angles.sin().to(q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) of [B, H, S, K] by the angles whose cosines and sines are
    [S, K/2] or [B, 1, S, K/2].
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Causal self-attention with G <= H key-value heads, [B, S, D] -> [B, S, D]."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        *,
        head_dim: int,
        rotary: Rotary,
        dropout: float,
        std: float,
        std_residual: float,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = Linear(hidden_size, num_heads * head_dim, bias=False, std=std)
        self.k = Linear(hidden_size, num_key_value_heads * head_dim, bias=False, std=std)
        self.v = Linear(hidden_size, num_key_value_heads * head_dim, bias=False, std=std)
        self.rotary = rotary
        self.core = CausalAttention(dropout)
        self.o = Linear(num_heads * head_dim, hidden_size, bias=False, std=std_residual)

    def forward(
        self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> [B, S, D]. Project, turn queries and keys by their positions, attend by
        head, project back.

        `documents` and `positions` as in `Llama`.
        """
        q, k, v = (self.split_heads(projection(x)) for projection in (self.q, self.k, self.v))
        q, k = self.rotary(q, k) if positions is None else self.rotary(q, k, positions=positions)
        return self.o(self.core(q, k, v, documents).transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, S, H K] -> [B, H, S, K], for as many heads as there are."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [B, S, D] -> [B, S, D] (Shazeer, "GLU Variants Improve
    Transformer").
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, std: float, std_residual: float
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, intermediate_size, bias=False, std=std)
        self.up = Linear(hidden_size, intermediate_size, bias=False, std=std)
        self.down = Linear(intermediate_size, hidden_size, bias=False, std=std_residual)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D] by SwiGLU (Shazeer 2020)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(
    index: int,
    num_local_experts: int | None,
    *,
    hidden_size: int,
    intermediate_size: int,
    std: float,
    std_residual: float,
    num_experts_per_tok: int = 2,
    moe_intermediate_size: int | None = None,
    num_shared_experts: int = 0,
    first_k_dense_replace: int = 0,
    topk_method: str | None = None,
    scoring_func: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    capacity_factor: float | None = None,
    drop_policy: str = "score",
    router_aux_loss_coef: float = 0.0,
    seq_aux: bool = False,
    router_z_loss_coef: float = 0.0,
    router_bias_update_speed: float = 0.0,
) -> nn.Module:
    """The MLP of block `index`: dense without experts and in the first blocks, else a mixture. Keys
    as Hugging Face's.
    """
    if num_local_experts is None or index < first_k_dense_replace:
        return GatedMLP(hidden_size, intermediate_size, std=std, std_residual=std_residual)
    inner = moe_intermediate_size or intermediate_size
    settings = RouterSettings(
        num_experts=num_local_experts,
        num_chosen=num_experts_per_tok,
        method=topk_method or ("greedy" if n_group == 1 else "group_limited_greedy"),
        scoring=scoring_func,
        normalise=norm_topk_prob,
        scale=routed_scaling_factor,
        num_groups=n_group,
        num_chosen_groups=topk_group,
        capacity_factor=capacity_factor,
        drop_by=drop_policy,
        balance_coef=router_aux_loss_coef,
        balance_per_sequence=seq_aux,
        z_coef=router_z_loss_coef,
        bias_speed=router_bias_update_speed,
    )
    shared = (
        GatedMLP(hidden_size, inner * num_shared_experts, std=std, std_residual=std_residual)
        if num_shared_experts
        else None
    )
    experts = Experts(num_local_experts, hidden_size, inner, std=std, std_residual=std_residual)
    return MixtureOfExperts(Router(hidden_size, settings, std=std), experts, shared)


class LlamaBlock(nn.Module):
    """Attention, then the MLP, each behind its norm and added to the residual stream."""

    def __init__(
        self,
        attention: LlamaAttention,
        mlp: nn.Module,
        hidden_size: int,
        *,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden_size, eps=eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(hidden_size, eps=eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> [B, S, D]; `documents` and `positions` as in `Llama`."""
        x = x + self.dropout(self.attention(self.norm1(x), documents, positions))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V]: the composition of `CHAIN`, one tensor between any
    two links.
    """

    more_keys: ClassVar = {
        key: p
        for key, p in inspect.signature(mixture).parameters.items()
        if p.default is not p.empty
    }

    def __init__(
        self,
        *,
        num_hidden_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        intermediate_size: int,
        vocab_size: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
        num_local_experts: int | None = None,
        **expert_keys: object,
    ) -> None:
        """Make the modules; sizes are in elements, and names those of Hugging Face.

        Args:
            num_hidden_layers: the number of blocks.
            hidden_size: D.
            num_attention_heads: H.
            intermediate_size: of the MLP.
            vocab_size: V.
            num_key_value_heads: G, which divides H; H by default.
            head_dim: K, which is even; D / H by default.
            max_position_embeddings: the longest S of a config; the model itself has no limit.
            rope_theta: the base of the rotary angles.
            rms_norm_eps: added to the mean square.
            tie_word_embeddings: the head's weight [V, D] is the embedding's.
            dropout: the rate, in attention and behind each part.
            initializer_range: the standard deviation of the first weights.
            num_local_experts: E; with it the MLPs are mixtures of experts.
            expert_keys: of the mixtures, as `mixture` has them.

        Raises:
            ModelError: a size below 1, sizes that do not divide, an odd K, or keys of experts
                without any.
        """
        if num_local_experts is None and expert_keys:
            raise ModelError(
                f"{', '.join(expert_keys)}: without num_local_experts there are no experts"
            )
        num_key_value_heads = num_key_value_heads or num_attention_heads
        check_positive(
            num_hidden_layers=num_hidden_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
        )
        check_positive(
            num_key_value_heads=num_key_value_heads,
            intermediate_size=intermediate_size,
            vocab_size=vocab_size,
        )
        if head_dim is None:
            check_divides("num_attention_heads", num_attention_heads, "hidden_size", hidden_size)
            head_dim = hidden_size // num_attention_heads
        check_divides(
            "num_key_value_heads", num_key_value_heads, "num_attention_heads", num_attention_heads
        )
        if head_dim % 2:
            raise ModelError(
                f"head_dim = {head_dim} is odd; rotary positions turn pairs of features"
            )
        super().__init__()
        std = initializer_range
        std_residual = std / math.sqrt(
            2 * num_hidden_layers
        )  # each block adds two parts to the residual stream

        def mlp(index: int) -> nn.Module:
            widths: JsonObject = {"std": std, "std_residual": std_residual, **expert_keys}
            return mixture(
                index,
                num_local_experts,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                **widths,
            )

        def block(index: int) -> LlamaBlock:
            attention = LlamaAttention(
                hidden_size,
                num_attention_heads,
                num_key_value_heads,
                head_dim=head_dim,
                rotary=Rotary(head_dim, rope_theta),
                dropout=dropout,
                std=std,
                std_residual=std_residual,
            )
            return LlamaBlock(attention, mlp(index), hidden_size, eps=rms_norm_eps, dropout=dropout)

        self.max_position_embeddings = max_position_embeddings
        self.embed = Embedding(vocab_size, hidden_size, std=std)
        self.blocks = nn.ModuleList(block(index) for index in range(num_hidden_layers))
        self.norm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False, std=std)
        if tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Token numbers [B, S] -> logits [B, S, V].

        `documents` [B, S]: of packed sequences, the number of the document of each token; none sees
        another. `positions` [B, S]: the place of each token in its document. Rotary positions are
        differences, so without it only rounding differs.
        """
        beside = {"documents": documents, "positions": positions}
        given = {name: value for name, value in beside.items() if value is not None}
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, **given)
        return self.head(self.norm(x))
