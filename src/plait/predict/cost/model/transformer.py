"""Transformers as blocks: GPT and Llama families, grouped-query and latent attention, mixtures of
experts.

Saved tensors follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (section 4.1). They are generalised to gated layers, fewer key-value heads and experts; the
numbers are per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.predict.cost.model.families import LLAMA, Traits
from plait.predict.cost.model.operations import (
    Attention,
    Block,
    Elementwise,
    Lookup,
    Loss,
    Matmul,
    Model,
    Operation,
    Saved,
)


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer, in the names of Hugging Face configs where these have one."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    traits: Traits = LLAMA
    """Traits of the family, beside the sizes."""
    table_width: int = 0
    """Width of the token table, where it is projected to the hidden size; 0: as wide."""
    fused_attention: bool = True
    attention_kernel: str = "portable"
    dropout: bool = False
    max_positions: int = 0
    """Rows of a learned position table; 0 for rotary positions."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    """The first layers that stay dense in a mixture of experts."""
    moe_every: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    fused_loss: bool = False
    """The loss is one kernel that reads the logits once and writes their gradient in their
    place.
    """
    loss_by_rows: bool = False
    """The loss is plait's, which makes no float32 copy of large logits."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as query heads unless grouped."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width_of_head(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def transformer_model(name: str, shape: Transformer, seq_len: int) -> Model:
    """The blocks of a transformer: embedding, layers, head."""
    dense = transformer_block(shape, experts=False)
    runs: list[tuple[Block, int]] = [(embedding_block(shape), 1)]
    if shape.num_experts:
        sparse = transformer_block(shape, experts=True)
        runs += _interleave(dense, sparse, shape)
    else:
        runs.append((dense, shape.num_hidden_layers))
    runs.append((head_block(shape), 1))
    return Model(
        name=name,
        runs=tuple(runs),
        seq_len=seq_len,
        tied_parameters=shape.vocab_size * (shape.table_width or shape.hidden_size)
        if shape.traits.tied
        else 0,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.kv_heads if not shape.kv_lora_rank else shape.num_attention_heads,
        hidden=shape.hidden_size,
        sizes={
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.kv_heads
            if not shape.kv_lora_rank
            else shape.num_attention_heads,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "num_local_experts": shape.num_experts,
            "seq_len": seq_len,
        },
    )


def _interleave(dense: Block, sparse: Block, shape: Transformer) -> list[tuple[Block, int]]:
    kinds = [
        sparse if layer >= shape.num_dense_layers and (layer + 1) % shape.moe_every == 0 else dense
        for layer in range(shape.num_hidden_layers)
    ]
    runs: list[tuple[Block, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] is kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return runs


def embedding_block(shape: Transformer) -> Block:
    """Token table, and what some families add: positions, token types, a projection, a norm."""
    width = shape.hidden_size
    table = shape.table_width or shape.hidden_size
    operations: list[Operation] = [Lookup("tokens", shape.vocab_size, table)]
    if table != width:
        operations.append(Matmul("project_in", table, width))
    if shape.max_positions:
        operations.append(
            Elementwise("positions", 2 * width, width, "sequence", shape.max_positions * width)
        )
    if shape.traits.token_types:
        operations.append(
            Elementwise(
                "token_types", 2 * width, width, "sequence", shape.traits.token_types * width
            )
        )
    if shape.traits.embedding_norm:
        operations.append(_norm("norm", shape))
    masks = width if shape.dropout else 0
    return Block("embedding", tuple(operations), Saved(sequence_masks=masks), width)


def head_block(shape: Transformer) -> Block:
    """Final norm, projection to the vocabulary, and the loss. Its logits live once in the working
    width and, where it is neither fused nor lean, once in float32.
    """
    width = shape.hidden_size
    vocab = shape.vocab_size
    table = shape.table_width or shape.hidden_size
    reads, writes, copied = (
        (vocab, 0.0, 0.0) if shape.fused_loss else (4.0 * vocab, 2.0 * vocab, vocab)
    )
    operations: list[Operation] = [_norm("norm", shape)] if shape.traits.final_norm else []
    if shape.traits.transformed_head:
        operations += [Matmul("transform", width, width, bias=True), _norm("transform_norm", shape)]
    if table != width:
        operations.append(Matmul("project_out", width, table))
    operations += [
        Matmul("head", table, vocab, "column", bias=shape.traits.head_bias),
        Loss("loss", float(reads), writes, "heads", vocab=vocab, by_rows=shape.loss_by_rows),
    ]
    saved = Saved(
        sequence=2.0 * width,
        gathered=float(width),
        tensor=float(vocab),
        logits=float(copied),
    )
    return Block("head", tuple(operations), saved, width)


def transformer_block(shape: Transformer, experts: bool) -> Block:
    """One layer: attention, then a feed-forward network or a mixture of experts."""
    attention, kept_a = _attention(shape)
    forward, kept_f = (
        _experts(shape) if experts else _feed_forward(shape, shape.intermediate_size, "mlp")
    )
    width = shape.hidden_size
    residual = Elementwise("residual", 4.0 * width, 2.0 * width)
    before = [_norm(f"norm{index + 1}", shape) for index in range(shape.traits.norms)]
    operations = (before[0], *attention, *before[1:], *forward, residual)
    masks = 2.0 * width if shape.dropout else 0.0
    saved = Saved(
        sequence=2.0 * width + kept_a.sequence + kept_f.sequence,
        tensor=kept_a.tensor + kept_f.tensor,
        sequence_masks=masks,
        scores=kept_a.scores,
        score_masks=kept_a.score_masks,
        statistics=kept_a.statistics + 2.0,
        gathered=kept_a.gathered + kept_f.gathered,
        unfused=kept_f.unfused,
        routed=kept_f.routed,
    )
    return Block(
        "moe" if experts else "layer",
        operations,
        saved,
        width,
        num_experts=shape.num_experts if experts else 0,
        top_k=shape.num_experts_per_tok if experts else 0,
    )


def _norm(name: str, shape: Transformer) -> Elementwise:
    numbers = shape.traits.norm
    return Elementwise(
        name,
        shape.hidden_size,
        shape.hidden_size,
        "sequence",
        shape.hidden_size * numbers,
        max(1, numbers),
    )


def _attention(shape: Transformer) -> tuple[tuple[Operation, ...], Saved]:
    heads = shape.num_attention_heads
    kv_heads = shape.kv_heads
    width = shape.hidden_size
    traits = shape.traits
    if shape.kv_lora_rank:
        return _latent_attention(shape)
    head = shape.width_of_head
    query = heads * head
    key = kv_heads * head
    core = Attention(
        "attention",
        heads,
        kv_heads,
        head,
        head,
        traits.causal,
        shape.fused_attention,
        shape.dropout,
        shape.attention_kernel,
    )
    parts = () if traits.fused else (query, key, key)
    operations: tuple[Operation, ...] = (
        Matmul("qkv", width, query + 2 * key, "column", bias=traits.qkv_bias, parts=parts),
        *_query_key_norm(traits, query, key, head),
        *((Elementwise("rotary", query + key, query + key, "heads"),) if traits.rotary else ()),
        *((Elementwise("sinks", heads, heads, "heads", heads),) if traits.sinks else ()),
        core,
        Matmul("out", query, width, "row", bias=traits.out_bias),
    )
    # Kept: the input of qkv (sequence); q, k, v and the input of `out` (tensor).
    return operations, _kept_attention(
        shape, sequence=width, tensor=2.0 * query + 2.0 * key, gathered=float(width)
    )


def _query_key_norm(traits: Traits, query: int, key: int, head: int) -> tuple[Operation, ...]:
    if not traits.qk_norm:
        return ()
    weights = 2 * head * traits.norm if traits.qk_norm == "head" else query + key
    return (Elementwise("qk_norm", query + key, query + key, "heads", weights),)


def _latent_attention(shape: Transformer) -> tuple[tuple[Operation, ...], Saved]:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): queries and keys through low-rank
    latents.
    """
    heads = shape.num_attention_heads
    width = shape.hidden_size
    bias = shape.traits.out_bias
    query_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    rank = shape.kv_lora_rank
    rope = shape.qk_rope_head_dim
    value = shape.v_head_dim
    if shape.q_lora_rank:
        queries: tuple[Operation, ...] = (
            Matmul("q_down", width, shape.q_lora_rank, bias=bias),
            Elementwise(
                "q_norm", shape.q_lora_rank, shape.q_lora_rank, "sequence", shape.q_lora_rank
            ),
            Matmul("q_up", shape.q_lora_rank, heads * query_dim, "column"),
        )
    else:
        queries = (Matmul("q", width, heads * query_dim, "column"),)
    operations = (
        *queries,
        Matmul("kv_down", width, rank + rope, bias=bias),
        Elementwise("kv_norm", rank, rank, "sequence", rank),
        Matmul("kv_up", rank, heads * (shape.qk_nope_head_dim + value), "column"),
        Elementwise("rotary", heads * rope + rope, heads * (query_dim + rope), "heads"),
        Attention(
            "attention",
            heads,
            heads,
            query_dim,
            value,
            shape.traits.causal,
            shape.fused_attention,
            shape.dropout,
            shape.attention_kernel,
        ),
        Matmul("out", heads * value, width, "row", bias=bias),
    )
    sequence = width + 2.0 * shape.q_lora_rank + 2.0 * rank + rope
    return operations, _kept_attention(
        shape, sequence, tensor=heads * (2.0 * query_dim + 2.0 * value), gathered=0.0
    )


def _kept_attention(shape: Transformer, sequence: float, tensor: float, gathered: float) -> Saved:
    heads = shape.num_attention_heads
    if shape.fused_attention:
        return Saved(sequence=sequence, gathered=gathered, tensor=tensor, statistics=float(heads))
    # Softmax output and, with dropout, its mask (a byte) and result: 5as of the paper in bytes at
    # two bytes a number.
    masks = float(heads) if shape.dropout else 0.0
    scores = heads * (2.0 if shape.dropout else 1.0)
    return Saved(
        sequence=sequence, gathered=gathered, tensor=tensor, scores=scores, score_masks=masks
    )


def _gates(shape: Transformer, inner: int) -> tuple[int, ...]:
    return (inner, inner) if shape.traits.gated and not shape.traits.fused else ()


def _feed_forward(shape: Transformer, inner: int, name: str) -> tuple[tuple[Operation, ...], Saved]:
    width = shape.hidden_size
    bias = shape.traits.mlp_bias
    gates = 2 if shape.traits.gated else 1
    operations: tuple[Operation, ...] = (
        Matmul(f"{name}_up", width, gates * inner, "column", bias=bias, parts=_gates(shape, inner)),
        Elementwise(f"{name}_activation", gates * inner, inner, "heads"),
        Matmul(f"{name}_down", inner, width, "row", bias=bias),
    )
    # Kept: the input (sequence), what the activation reads, and what it writes.
    unfused = (
        float(inner) if shape.traits.gated else 0.0
    )  # the activated gate, beside gate, value and their product
    return operations, Saved(
        sequence=width, gathered=width, tensor=(gates + 1.0) * inner, unfused=unfused
    )


def _experts(shape: Transformer) -> tuple[tuple[Operation, ...], Saved]:
    """Router, top-k experts, shared experts. Each token is copied top_k times, so its inputs and
    outputs are kept top_k times.
    """
    width = shape.hidden_size
    inner = shape.moe_intermediate_size or shape.intermediate_size
    top_k = shape.num_experts_per_tok
    traits = shape.traits
    gates = 2 if shape.traits.gated else 1
    experts = shape.num_experts
    operations: tuple[Operation, ...] = (
        Matmul("router", width, experts, bias=traits.router_bias),
        Elementwise("permute", 2.0 * top_k * width, 2.0 * top_k * width, "sequence"),
        Matmul(
            "experts_up",
            width,
            gates * inner,
            "column",
            rows=top_k,
            bias=traits.expert_bias,
            copies=experts,
            parts=_gates(shape, inner),
        ),
        Elementwise("experts_activation", gates * inner * top_k, inner * top_k, "heads"),
        Matmul(
            "experts_down", inner, width, "row", rows=top_k, bias=traits.expert_bias, copies=experts
        ),
    )
    routed = top_k * (2.0 * width + (gates + 1.0) * inner)
    sequence = float(width + shape.num_experts)
    tensor = 0.0
    if shape.shared_intermediate_size:
        shared, kept = _feed_forward(shape, shape.shared_intermediate_size, "shared")
        operations += (*shared, *((Matmul("shared_gate", width, 1),) if traits.shared_gate else ()))
        tensor = kept.tensor
    return operations, Saved(sequence=sequence, gathered=float(width), tensor=tensor, routed=routed)
