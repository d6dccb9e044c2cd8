"""The words of an answer: what is to be run and by what, and the prediction with its breakdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.plan import Plan
from plait.predict.cost.memory.rank_memory import Memory, Numerics
from plait.predict.cost.model.operations import Model
from plait.predict.cost.widths import BYTES


@dataclass(frozen=True)
class Runtime:
    """How the framework behaves that runs a plan. The defaults are plait's; published runs of
    others set what they do.
    """

    gradient_bytes: float | None = None
    """Width of a gradient, kept and sent; None: float32 or wider, whatever the weights are. The
    ZeRO paper counts 2.
    """
    overlap_gradients: bool = True
    """Gradients are reduced while the last backward runs."""
    overlap_sends: bool = True
    """A stage computes on while it sends to its neighbour."""
    scatters_sends: bool = False
    """Activations between stages are sent in parts, one a rank of the tensor group, and gathered
    there. This is Narayanan et al., Megatron-LM 2021, section 4.1.
    """
    keep_gathered: bool = False
    """Sequence parallelism keeps what it gathered, instead of gathering again in backward."""
    selective_sends: bool = True
    """Selective recomputation repeats the communication between the products that it keeps."""
    fused_rows: bool = True
    """The product of a row and its sum over the ranks are one step. Recomputation repeats it as a
    whole, at the end of a block too.
    """
    balanced_stages: bool = True
    """Stages are cut by cost, not by equal numbers of layers."""
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


@dataclass(frozen=True)
class Job:
    """The work of an estimate: model, samples a step, optimizer, and the runtime."""

    model: Model
    global_batch: int
    optimizer: str = "adamw"
    runtime: Runtime = field(default_factory=Runtime)

    def gradient_width(self, precision: str) -> float:
        """Bytes of a gradient, kept and sent."""
        return self.runtime.gradient_bytes or max(4, BYTES[precision])

    def numerics(self, plan: Plan) -> Numerics:
        """How the plan computes: precision, whether elementwise operations are fused, and what is
        recomputed.
        """
        return plan.precision, plan.compile or self.runtime.fused_kernels, plan.remat


@dataclass(frozen=True)
class Breakdown:
    """Seconds of the slowest rank by cause; they add up to the step."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    update: float = 0.0
    host: float = 0.0
    cores: float = 0.0
    """Ranks that share the cores of a processor."""
    other: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The causes by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Estimate:
    """A prediction. `as_dict` has the keys of `plait estimate --json`."""

    plan: Plan
    step_seconds: float
    memory: Memory
    memory_limit: float
    traffic: Mapping[str, float]
    bubble_fraction: float
    tokens: int
    model_flops: float
    num_devices: int
    peak_flops: float
    price_per_hour: float
    breakdown: Breakdown = field(default_factory=Breakdown)
    stage_memory: tuple[Memory, ...] = ()
    """Memory of each pipeline rank."""
    host_overfull: float = 0.0
    """Memory that offloaded state needs of a node's host, over what the host has."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.total <= self.memory_limit and self.host_overfull <= 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or samples, where a sample has no sequence) a second over all devices."""
        return self.tokens / self.step_seconds

    @property
    def tflops_per_device(self) -> float:
        """Model flops (three forwards, the whole attention square, no recomputation) a second and
        device, in 1e12.
        """
        return self.model_flops / self.step_seconds / self.num_devices / 1e12

    @property
    def cost_per_million_tokens(self) -> float:
        """US dollars, from the cluster's price of a device."""
        return self.price_per_hour / 3600 * self.num_devices / self.tokens_per_second * 1e6

    def as_dict(self) -> dict[str, Any]:
        """The contract's keys, SI units."""
        return {
            "plan": str(self.plan),
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.num_devices,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.tflops_per_device * 1e12 / self.peak_flops,
            "bubble_fraction": self.bubble_fraction,
            "memory": self.memory.as_dict(),
            "memory_limit": self.memory_limit,
            "traffic": dict(self.traffic),
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "breakdown_seconds": self.breakdown.as_dict(),
        }
