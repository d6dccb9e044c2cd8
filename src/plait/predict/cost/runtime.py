"""How a framework behaves that runs a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StageCut = Literal["cost", "layers", "filled"]
"""How a model is cut into stages: by equal cost, by equal numbers of layers, or by filling.

A filled stage takes blocks until their products pass its share, the block that passes included.
"""


@dataclass(frozen=True)
class Runtime:
    """How the framework behaves that runs a plan. The defaults are plait's; published runs of
    others set what they do.
    """

    gradient_bytes: float | None = None
    """Width of a gradient, kept and sent; None: float32 or wider, whatever the weights are. The
    ZeRO paper counts 2.
    """
    whole_gradient_bytes: float = 0.0
    """Width of gradients that a whole backward leaves, before they are added to those of earlier
    micro-batches. In a pipeline other micro-batches live beside them.
    """
    bucket_numbers: float | None = None
    """Gradients that are reduced in one collective; None: those of a block."""
    overlap_gradients: bool = True
    """Gradients are reduced while the last backward runs."""
    overlap_sends: bool = True
    """A stage computes on while it sends to its neighbour."""
    scatters_sends: bool = False
    """Activations between stages are sent in parts, one a rank of the tensor group, and gathered
    there. This is Narayanan et al., Megatron-LM 2021, section 4.1.
    """
    message_bytes: int = 0
    """Bytes of a number between stages and tensor ranks, where the precision has more; 0: as it."""
    keep_gathered: bool = False
    """Sequence parallelism keeps what it gathered, instead of gathering again in backward."""
    hides_regather: bool = False
    """The product of the input's gradient hides what is gathered again in backward."""
    runs_ahead: bool = False
    """The host runs ahead of its device, and memory that a collective still reads is not free. So
    outputs of row-parallel layers lie beside those of later layers (`waiting_share`).
    """
    selective_sends: bool = True
    """Selective recomputation repeats the communication between the products that it keeps."""
    repeated_products: float = 0.0
    """Part of a block's products that selective recomputation repeats, in place of the attention.
    torchtitan keeps every other one (`_apply_op_sac`).
    """
    repeats_latents: bool = False
    """Selective recomputation is DeepSeek-V3's (sections 3.2.3 and 3.3.3): norms, up-projections of
    latents and activations are repeated. Inputs of linear layers are kept in eight bits, that of
    the attention's output layer in twelve.
    """
    fused_rows: bool = True
    """The product of a row and its sum over the ranks are one step. Recomputation repeats it as a
    whole, at the end of a block too.
    """
    stage_cut: StageCut = "cost"
    """How the model is cut into stages."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest expert rank over the mean: a step waits for it, and it receives as many
    more.
    """
    expert_traffic: float = 1.0
    """Part of a token's bytes that is sent to each of its experts. It is below 1 where tokens
    travel in eight bits. With routing limited to a few nodes, a token goes to each node once
    (DeepSeek-V3, section 2.1.2).
    """
    reduces_whole: bool = False
    """ZeRO-1 all-reduces gradients, although each rank needs only a part of them."""
    fused_kernels: bool = False
    """Elementwise operations run as fused kernels, whatever the plan says of `compile`."""
    fused_accumulation: bool = False
    """The product that makes a weight's gradient adds it to what earlier micro-batches left."""
    copies_gradients: bool = True
    """Each gradient is copied from where backward makes it to where gradients are added up."""
    one_pass_update: bool = True
    """On an accelerator, one rank with one micro-batch leaves gradients in the layers' precision.
    AdamW reads them there, and writes the rounded parameters itself.
    """
    skew_seconds: float = 0.0
    """Seconds that each rank adds to the start of its tensor group's collective. They arise where
    stages on several nodes exchange by blocking sends. Hosts that waited for a send go on out of
    step, and a collective waits for the last of them.
    """
    late_seconds: float = 0.0
    """Seconds that each rank is late by where each send is followed by waiting for the device. They
    are then exposed, however much work is queued.
    """
    overlap_tensor: float = 0.0
    """The part of tensor-parallel communication that is split and hidden behind its own matrix
    product.
    """
    overlap_expert: float = 0.0
    """The part of dispatch and combine that is hidden behind the compute of another micro-batch, as
    DualPipe does (DeepSeek-V3, section 3.2.1).
    """
    compute_share: float = 1.0
    """The part of a device's units that compute, where others are set apart to send."""


MANY_FORWARDS = 6
"""Forwards after which a host is ahead by all of them. Set on the published runs of nanotron."""


def waiting_share(num_stages: int, micro_batches: int) -> float:
    """The part of the row-parallel outputs of live micro-batches that lie in memory at once.

    A host that runs ahead (`Runtime.runs_ahead`) gains on its device with each forward. It waits
    where a stage needs its first gradient. After one forward none of the outputs lie in memory,
    after `MANY_FORWARDS` forwards all of them do.
    """
    forwards = micro_batches if num_stages == 1 else min(num_stages, micro_batches)
    return min(1.0, (forwards - 1) / (MANY_FORWARDS - 1))
