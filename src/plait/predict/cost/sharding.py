"""How a plan divides one block among the ranks of a stage: the numbers that time, memory and
traffic share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from plait.mesh.tensor_layout import TensorLayout, tensor_layout
from plait.plan import Plan, TensorAxis
from plait.plan.axes import TensorMode
from plait.predict.cost.cached_hash import caches_hash
from plait.predict.cost.runtime import Runtime, waiting_share


@caches_hash
@dataclass(frozen=True)
class Sharding:
    """The inner axes of a plan, and the tokens that one rank's line of them works on in a
    micro-batch.
    """

    tp: int = 1
    mode: TensorMode = "1d"
    sequence_parallel: bool = False
    q: int = 1
    depth: int = 1
    cp: int = 1
    context: str = "ring"
    ep: int = 1
    seq_len: int = 1
    samples: float = 1.0
    """Samples of the mean micro-batch, which time and traffic are for."""
    most_samples: float | None = None
    """Samples of the largest micro-batch, which memory is for; None: all have as many."""
    regather: bool = False
    """Sequence parallelism keeps the sharded input of a product and gathers it again in
    backward.
    """
    gathered_share: float = 1.0
    """Part of what sequence parallelism gathers that lies in memory until backward. Outputs that
    wait for their sums are counted here: they have as many bytes.
    """
    imbalance: float = 1.0
    """`Runtime.expert_imbalance`, where experts are divided."""
    folded: bool = False
    """Experts take the ranks of the tensor axis, too, which does not cut them."""
    expert_traffic: float = 1.0
    """`Runtime.expert_traffic`."""
    skew: float = 0.0
    """`Runtime.skew_seconds`, where there are stages."""
    late: float = 0.0
    """`Runtime.late_seconds`, where there are stages."""
    repeated_products: float = 0.0
    """`Runtime.repeated_products`."""
    repeats_latents: bool = False
    """`Runtime.repeats_latents`."""
    resend: bool = True
    """Selective recomputation runs the communication between products again."""
    fused_rows: bool = True
    """`Runtime.fused_rows`."""
    scatters_sends: bool = False
    """`Runtime.scatters_sends`."""
    message_bytes: int = 0
    """`Runtime.message_bytes`."""
    ranks: int = 1
    """Ranks of the whole plan: on a processor they share its cores."""

    def message_width(self, width: int) -> int:
        """Bytes of a number of `width` bytes while it travels between stages or tensor ranks."""
        return min(width, self.message_bytes or width)

    @cached_property
    def layout(self) -> TensorLayout:
        """The cuts and moves of the tensor axis."""
        return tensor_layout(TensorAxis(self.tp, self.mode, self.sequence_parallel, self.depth))

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context rank; a grid cuts samples, and fills up what does
        not divide.
        """
        if self.mode == "1d":
            return self.samples * self.seq_len / self.cp
        parts = self.sample_parts
        whole = math.floor(self.samples)
        larger = self.samples - whole  # the part of the micro-batches that have a sample more
        filled = (1 - larger) * math.ceil(whole / parts) + larger * math.ceil((whole + 1) / parts)
        return filled * parts * self.seq_len / self.cp

    @cached_property
    def of_largest(self) -> Sharding:
        """The sharding of the largest micro-batch."""
        if self.most_samples is None:
            return self
        return replace(self, samples=self.most_samples, most_samples=None)

    def by_size(self, num_micro_batches: int) -> tuple[tuple[Sharding, int], ...]:
        """The sharding of each size of micro-batch, with how many of them have it."""
        if self.most_samples is None:
            return ((self, num_micro_batches),)
        largest = self.of_largest
        smaller = replace(largest, samples=largest.samples - 1)
        count = round(num_micro_batches * (self.samples - smaller.samples))
        return ((largest, count), (smaller, num_micro_batches - count))

    @cached_property
    def sample_parts(self) -> int:
        """Among how many ranks of the tensor axis the samples of a micro-batch are dealt out."""
        return self.layout.size(self.layout.residual.samples)

    @cached_property
    def sequence_split(self) -> int:
        """By how much the activations between the matrix products of a layer are divided."""
        return self.layout.size(self.layout.residual.every)

    @cached_property
    def weight_split(self) -> int:
        """By how much the tensor axis divides a weight: 2.5D keeps a copy for each depth."""
        column = self.layout.linear["column"]
        return self.layout.size(column.out + column.into)


def sharding(
    plan: Plan,
    seq_len: int,
    samples: float,
    runtime: Runtime | None = None,
    *,
    most_samples: float | None = None,
) -> Sharding:
    """The sharding of a plan for micro-batches of `samples` samples, as the
    `plait.predict.cost.runtime.Runtime` does it. `most_samples` are those of the largest, where
    they are not alike.
    """
    tp = plan.tp
    return Sharding(
        tp=tp.size,
        mode=tp.mode,
        sequence_parallel=tp.sequence_parallel,
        q=tp.q if tp.mode != "1d" else 1,
        depth=tp.depth if tp.mode == "2.5d" else 1,
        cp=plan.cp.size,
        context=plan.cp.strategy,
        ep=plan.ep,
        seq_len=seq_len,
        samples=samples,
        most_samples=most_samples,
        regather=runtime is not None and not (runtime.keep_gathered or runtime.hides_regather),
        gathered_share=gathered_share(plan, runtime),
        imbalance=runtime.expert_imbalance if runtime is not None and plan.ep > 1 else 1.0,
        folded=plan.folds_experts,
        expert_traffic=runtime.expert_traffic if runtime is not None else 1.0,
        skew=runtime.skew_seconds if runtime is not None and plan.pp.size > 1 else 0.0,
        late=runtime.late_seconds if runtime is not None and plan.pp.size > 1 else 0.0,
        repeated_products=runtime.repeated_products if runtime is not None else 0.0,
        repeats_latents=runtime is not None and runtime.repeats_latents,
        resend=runtime is None or runtime.selective_sends,
        fused_rows=runtime is None or runtime.fused_rows,
        scatters_sends=runtime is not None and runtime.scatters_sends,
        message_bytes=runtime.message_bytes if runtime is not None else 0,
        ranks=plan.world_size,
    )


def gathered_share(plan: Plan, runtime: Runtime | None) -> float:
    """Part of what sequence parallelism gathers that lies in memory until backward."""
    if runtime is None or runtime.keep_gathered:
        return 1.0
    return waiting_share(plan.pp.size, plan.micro_batches) if runtime.runs_ahead else 0.0
