"""The words of a model description: operations inside blocks inside a model.

An operation carries sizes, weights, its saved tensors for backward, and how a tensor axis may split
it. So flops, memory, traffic and time are four readings of one description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Split = Literal["column", "row", "heads", "sequence", "none"]
"""How 1D tensor parallelism divides an operation: its outputs, its inputs, its heads, only its
tokens (sequence parallel), or not.
"""


@dataclass(frozen=True)
class Matmul:
    """`rows x inputs @ inputs x outputs`, `rows` for each token (or sample): 1 for a linear layer,
    H*W for a convolution.
    """

    name: str
    inputs: int
    outputs: int
    split: Split = "none"
    rows: float = 1.0
    bias: bool = False
    copies: int = 1
    """Weights of this shape (experts); each token uses `rows` of them."""
    parts: tuple[int, ...] = ()
    """Outputs of the layers that take the same input (query, key and value), where it is not one
    matrix. The input moves once for all of them.
    """
    raw: bool = False
    """The input is data, which needs no gradient."""
    convolution: bool = False
    """Runs as a convolution, `rows` being its output pixels."""
    weightless: bool = False
    """Both factors are activations."""

    @property
    def parameters(self) -> int:
        """Weights and biases, all copies."""
        if self.weightless:
            return 0
        return self.copies * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    def flops(self) -> float:
        """Forward flops for each token."""
        return 2.0 * self.rows * self.inputs * self.outputs


LATENT_PRODUCTS = frozenset({"q_up", "kv_up"})
"""Products that make queries, keys and values from latents (DeepSeek-V2, section 2.1)."""

TORCHS = "torch"
"""The kernel that `scaled_dot_product_attention` of torch 2.11 and later takes by itself."""
ATTENTION_KERNELS = {
    **dict.fromkeys(("flash_attention_3", "cudnn"), "tuned"),
    **dict.fromkeys(("flash_attention_1", "triton"), "early"),
    TORCHS: "chosen",
}
"""Generation of a fused attention by the name that a config gives it. `tuned` uses the matrix units
of the newest devices, `early` is the first FlashAttention. `chosen` is `tuned` where torch takes
cuDNN's by itself, and `portable` elsewhere. All others are `portable`, as FlashAttention-2 is.
"""


@dataclass(frozen=True)
class Attention:
    """Scores and weighted values over the sequence; `causal` halves what a fused kernel
    computes.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True
    fused: bool = True
    """A fused kernel keeps one statistic per row; otherwise scores, mask and probabilities live in
    memory.
    """
    dropout: bool = False
    kernel: str = "portable"
    """Generation of the fused kernel, one of `ATTENTION_KERNELS`."""

    @property
    def parameters(self) -> int:
        """None: the projections are matmuls of their own."""
        return 0

    def flops(self, seq_len: int) -> float:
        """Forward flops for each token, the full square of the sequence (halve for a fused causal
        kernel).
        """
        return 2.0 * seq_len * self.num_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Elementwise:
    """An operation bound by memory: `reads` + `writes` numbers for each token, `split` says whether
    a tensor axis divides them.
    """

    name: str
    reads: float
    writes: float
    split: Split = "sequence"
    parameters: int = 0
    statistics: int = 0
    """Numbers a token that a norm over features exchanges where features are cut. A layer norm has
    2, an RMS norm 1.
    """


LARGE = "large"
"""A value of `fused_cross_entropy`: the loss makes no float32 copy of large logits."""
LARGE_LOGITS = 1 << 24
"""Logits beyond which plait's loss makes no float32 copy of them, on an accelerator."""
LARGE_LOGITS_OF_PROCESSORS = 1 << 19
"""Logits beyond which plait's loss makes no float32 copy of them, on a processor."""


@dataclass(frozen=True)
class Loss(Elementwise):
    """A cross-entropy over `vocab` classes."""

    vocab: int = 0
    by_rows: bool = False
    """Large logits have no float32 copy, as in plait's own losses. Compiled, two kernels make it:
    one reads the logits, the other reads them again and writes their gradient.
    """

    def is_lean(self, tokens: float, large: int = LARGE_LOGITS) -> bool:
        """Whether the loss of so many tokens makes no float32 copy. `large`: the most logits that
        have one.
        """
        return self.by_rows and tokens * self.vocab > large


@dataclass(frozen=True)
class Lookup:
    """A table read by index: an embedding. A tensor axis splits its weight over the vocabulary, or
    each rank has it whole (`split` "none").
    """

    name: str
    rows: int
    width: int
    split: Split = "column"

    @property
    def parameters(self) -> int:
        """The table."""
        return self.rows * self.width


Operation = Matmul | Attention | Elementwise | Lookup


@dataclass(frozen=True)
class Saved:
    """Activations that one block keeps for backward, in numbers for each token: `sequence` is
    divided only by sequence parallelism, `tensor` always.

    `*_masks` are single bytes. `scores` is multiplied by the length of the sequence and is what
    selective recomputation drops.
    """

    sequence: float = 0.0
    tensor: float = 0.0
    sequence_masks: float = 0.0
    tensor_masks: float = 0.0
    scores: float = 0.0
    score_masks: float = 0.0
    statistics: float = 0.0
    """float32 numbers for each token (softmax statistics of a fused kernel, norms)."""
    gathered: float = 0.0
    """The part of `sequence` that column-split products read: sequence parallelism gathers it,
    again in backward or once and keeps it.
    """
    unfused: float = 0.0
    """Numbers kept besides in `tensor` when elementwise operations are not fused."""
    logits: float = 0.0
    """Numbers that are also kept in float32 by the loss."""
    routed: float = 0.0
    """Numbers for each token that an expert axis moves and keeps (inputs and insides of experts),
    divided like `tensor`.
    """


@dataclass(frozen=True)
class Block:
    """One repeated piece of a model: what a pipeline stage holds a whole number of."""

    name: str
    operations: tuple[Operation, ...]
    saved: Saved
    width: int
    """Numbers for each token at the border of the block. A stage sends them to the next, and full
    recomputation keeps them.
    """
    num_experts: int = 0
    top_k: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, because blocks are keys of every cache of the cost model."""
        return hash(
            (self.name, self.operations, self.saved, self.width, self.num_experts, self.top_k)
        )

    @cached_property
    def parameters(self) -> int:
        """All weights of the block, experts included."""
        return sum(op.parameters for op in self.operations)

    @cached_property
    def expert_parameters(self) -> int:
        """The weights that an expert axis divides."""
        return sum(
            op.parameters for op in self.operations if isinstance(op, Matmul) and op.copies > 1
        )

    def flops(self, seq_len: int) -> float:
        """Forward flops for each token; attention counts the whole square (see
        `Attention.flops`).
        """
        total = 0.0
        for op in self.operations:
            if isinstance(op, Matmul):
                total += op.flops()
            elif isinstance(op, Attention):
                total += op.flops(seq_len)
        return total


def is_layer(block: Block) -> bool:
    """Whether a block stands between embedding and head."""
    return block.name not in {"embedding", "head", "stem"}


@dataclass(frozen=True, eq=False)
class Model:
    """A model as runs of equal blocks, in order: (block, how many). Compared by identity, as it is
    a key of caches.
    """

    name: str
    runs: tuple[tuple[Block, int], ...]
    seq_len: int
    """Tokens in a sample; 1 where a sample has no sequence."""
    tied_parameters: int = 0
    """Numbers counted in two blocks and stored once when these share a stage (tied embeddings)."""
    num_heads: int = 1
    num_kv_heads: int = 1
    hidden: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of a model that the rules of a plan ask about, by the keys of configs."""

    def blocks(self) -> Iterator[Block]:
        """Every block in order."""
        for block, count in self.runs:
            for _ in range(count):
                yield block

    @cached_property
    def block_matrices(self) -> int:
        """The numbers of all matrices of layers, without experts, embedding and head."""
        return sum(
            count * op.inputs * op.outputs
            for block, count in self.runs
            for op in block.operations
            if is_layer(block)
            and isinstance(op, Matmul)
            and not (op.weightless or op.convolution)
            and op.copies == 1
        )

    @cached_property
    def num_blocks(self) -> int:
        """How many blocks there are, embedding and head included."""
        return sum(count for _, count in self.runs)

    @cached_property
    def num_repeated(self) -> int:
        """How many blocks stand between embedding and head: the layers."""
        inner = sum(count for block, count in self.runs if is_layer(block))
        return inner or self.num_blocks

    @cached_property
    def parameters(self) -> int:
        """All distinct weights."""
        return sum(block.parameters * count for block, count in self.runs) - self.tied_parameters

    @cached_property
    def active_parameters(self) -> int:
        """The weights that one token meets: a mixture of experts uses top_k of num_experts."""
        unused = sum(
            round(block.expert_parameters * (1 - block.top_k / block.num_experts)) * count
            for block, count in self.runs
            if block.num_experts
        )
        return self.parameters - unused

    @cached_property
    def num_experts(self) -> int:
        """The experts of a layer, 0 for a dense model."""
        return max((block.num_experts for block, _ in self.runs), default=0)

    @cached_property
    def forward_flops(self) -> float:
        """Flops of one sample forward, attention as a causal half where it is causal."""
        total = 0.0
        for block, count in self.runs:
            total += count * block.flops(self.seq_len)
            for op in block.operations:
                if isinstance(op, Attention) and op.causal:
                    total -= count * op.flops(self.seq_len) / 2
        return total * self.seq_len
