"""The words of an answer: what is to be run and by what, and the prediction with its breakdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plait.plan import Plan
from plait.plan.axes import BlockRemat
from plait.plan.gathered import KeepGathered
from plait.plan.precisions import Messages
from plait.predict.cost import bars
from plait.predict.cost.cached_hash import caches_hash
from plait.predict.cost.memory.rank_memory import Numerics, RankMemory
from plait.predict.cost.model.adapters import Adapters
from plait.predict.cost.model.operations import Model
from plait.predict.cost.runtime import Runtime
from plait.predict.cost.widths import BYTES
from plait.values import JsonObject

OPTIMIZER_NUMBERS = {"adamw": 2, "adam": 2, "muon": 2, "sgd": 0, "momentum": 1}
"""float32 numbers that an optimizer keeps for each weight, master weights aside.

One that is not known is taken to keep as many as AdamW. Muon keeps one less for a matrix.
"""


GIB = 2.0**30


@caches_hash
@dataclass(frozen=True)
class StateRules:
    """The part of a job that the state of its ranks depends on.

    Jobs with another batch or another length of samples share it, and what is computed from it.
    """

    optimizer: str
    state_numbers: float
    """float32 numbers that the optimizer keeps for a weight on average, master weights aside."""
    runtime: Runtime
    adapters: Adapters
    tied_parameters: int

    def gradient_width(self, precision: str) -> float:
        """Bytes of a gradient, kept and sent."""
        return self.runtime.gradient_bytes or max(4, BYTES[precision])


@caches_hash
@dataclass(frozen=True)
class Job:
    """The work of an estimate: model, samples a step, optimizer, and the runtime."""

    model: Model
    global_batch: int
    optimizer: str = "adamw"
    runtime: Runtime = field(default_factory=Runtime)
    adapters: Adapters = field(default_factory=Adapters)
    """Adapters that are trained beside a frozen model; by default there are none."""
    shares: tuple[int, ...] = ()
    """Parts of the batch by data rank, under plans with so many of them; equal by default."""
    counts: tuple[int, ...] = ()
    """Layers of each pipeline stage, under plans with so many of them; balanced by default."""
    remat: tuple[BlockRemat, ...] = ()
    """Recomputation of each block under `remat:auto`; chosen by memory where there is none."""
    offload_activations: bool = False
    """Whether what blocks keep for backward waits in the host's memory."""
    kept: KeepGathered = None
    """Blocks that zero3 keeps whole once they are gathered; `auto` chooses them by memory."""

    @property
    def messages(self) -> Messages:
        """Whether activations travel as they are, or in two bytes a number."""
        return "bf16" if self.runtime.message_bytes else "whole"

    def counts_of(self, plan: Plan) -> tuple[int, ...]:
        """The layers of each stage of a plan; none where it has another number of stages."""
        return self.counts if len(self.counts) == plan.pp.num_stages else ()

    @property
    def state_numbers(self) -> float:
        """float32 numbers that the optimizer keeps for a weight on average, master weights
        aside.
        """
        numbers = OPTIMIZER_NUMBERS.get(self.optimizer, OPTIMIZER_NUMBERS["adamw"])
        if self.optimizer != "muon":
            return numbers
        return numbers - self.model.block_matrices / self.model.parameters

    def micro_batch(self, plan: Plan) -> tuple[float, float]:
        """Samples of the slowest rank's micro-batches: of the mean one, and of the largest."""
        size = plan.dp.size
        shares = self.shares if len(self.shares) == size else (1,) * size
        samples = -(-self.global_batch * max(shares) // sum(shares))
        return samples / plan.micro_batches, float(-(-samples // plan.micro_batches))

    @cached_property
    def training(self) -> StateRules:
        """The part that the state of a rank depends on."""
        tied = self.model.tied_parameters
        return StateRules(self.optimizer, self.state_numbers, self.runtime, self.adapters, tied)

    def gradient_width(self, precision: str) -> float:
        """Bytes of a gradient, kept and sent."""
        return self.training.gradient_width(precision)

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


@dataclass(frozen=True, repr=False)
class Estimate:
    """A prediction. `as_dict` has the keys of `plait estimate --json`."""

    plan: Plan
    step_seconds: float
    memory: RankMemory
    memory_limit: float
    traffic: Mapping[str, float]
    bubble_fraction: float
    tokens: int
    model_flops: float
    num_devices: int
    peak_flops: float
    price_per_hour: float
    breakdown: Breakdown = field(default_factory=Breakdown)
    stage_memory: tuple[RankMemory, ...] = ()
    """Memory of each pipeline rank."""
    host_overfull: float = 0.0
    """Memory that offloaded state needs of a node's host, over what the host has."""
    state_bytes: float = 0.0
    """Weights of the optimizer and its state, once for all ranks: what a checkpoint holds."""
    power_watts: float = 0.0
    """Power of a board, 0 where it is unknown."""
    devices_per_node: int = 1
    network_bandwidth: float = 1.0
    """Bytes a second of one device to another node."""
    causal_flops: float = 0.0
    """Model flops with half of a causal attention, which is what a fused kernel computes."""
    unit: str = "tokens"
    """The unit that is counted as tokens: "samples" where a sample has no sequence."""
    bar_width: float = 1.0
    """Width of the time bar, of the usual one: what a calibration of the cluster leaves."""
    reach: str = "one node"
    """How far the run reaches, by which its error bars are chosen (see `bars.reach`)."""
    shares: tuple[int, ...] = ()
    """Parts of the batch by data rank, where they were chosen for kinds of device."""
    counts: tuple[int, ...] = ()
    """Layers of each pipeline stage, where they were chosen for kinds of device."""
    part: str = ""
    """The one kind of a mixed cluster that it runs on; empty for all devices."""
    remat: tuple[BlockRemat, ...] = ()
    """Recomputation of each block under `remat:auto`, in the order of the model."""
    keep_gathered: tuple[int, ...] | None = None
    """The numbers of the blocks that zero3 keeps whole, from 0; None where none were asked for."""

    def __repr__(self) -> str:
        return f"<Estimate {self}>"

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        memory = f"{self.memory.total / GIB:.1f} of {self.memory_limit / GIB:.1f} GiB"
        return f"{self.plan}: {self.step_seconds:.4g} s a step, {memory} ({verdict})"

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.total <= self.memory_limit and self.host_overfull <= 1.0

    @property
    def fits_probability(self) -> float:
        """The probability that the fullest rank has room, by the errors of published runs."""
        if self.host_overfull > 1.0:
            return 0.0
        return bars.probability_below(self.memory_limit, self.memory.total, self.reach)

    def bars(self) -> dict[str, list[float]]:
        """The 90 % bars [low, high] of the step's seconds and the memory's total."""
        return {
            "step_seconds": bars.bar(self.step_seconds, "time", self.reach, self.bar_width),
            "memory_total": bars.bar(self.memory.total, "memory", self.reach),
        }

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

    def as_dict(self) -> JsonObject:
        """The contract's keys, SI units."""
        return {
            "plan": str(self.plan),
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.num_devices,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.tflops_per_device * 1e12 / self.peak_flops,
            "mfu_causal": self.causal_flops
            / (self.step_seconds * self.num_devices * self.peak_flops),
            "unit": self.unit,
            "bubble_fraction": self.bubble_fraction,
            "memory": self.memory.as_dict(),
            "memory_limit": self.memory_limit,
            "traffic": dict(self.traffic),
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "breakdown_seconds": self.breakdown.as_dict(),
            "bars": self.bars(),
            **({"shares": list(self.shares)} if self.shares else {}),
            **({"counts": list(self.counts)} if self.counts else {}),
            **({"part": self.part} if self.part else {}),
            **({"remat": list(self.remat)} if self.remat else {}),
            **({} if self.keep_gathered is None else {"keep_gathered": list(self.keep_gathered)}),
        }
