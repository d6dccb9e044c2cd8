"""Frameworks that run a plan: how other frameworks behave, by name, and which plans they offer.

`plait estimate --framework megatron-core` predicts the plan as that framework would run it, and
`plait plan` then chooses among the plans that it offers. What stands here is from each framework's
own code; its two times of waiting (`LATE`, `SKEW`) and `MANY_FORWARDS` were set on published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from plait.errors import ConfigError, nearest
from plait.plan import Plan
from plait.plan.axes import CONTEXT_STRATEGIES, DATA_STRATEGIES, TENSOR_MODES
from plait.plan.facts import PLAIN_SCHEDULE, ZERO, DataStrategy, schedules_of
from plait.predict.cost.model.operations import LARGE, TORCHS
from plait.predict.cost.runtime import Runtime
from plait.values import JsonMapping, JsonValue

SDPA = "sdpa"
"""The attention of torch, which is FlashAttention-2 in most of the published runs."""
LATE = 0.16e-3
"""`Runtime.late_seconds` of Megatron-DeepSpeed."""
WHOLE = float("inf")
"""`Runtime.bucket_numbers` where all gradients of a rank are reduced in one collective."""
SKEW = 0.25e-3
"""`Runtime.skew_seconds` of nanotron."""


@dataclass(frozen=True)
class Framework:
    """How a framework computes and what it offers. None offers all of it."""

    name: str
    runtime: Runtime = field(default_factory=Runtime)
    attention: str = SDPA
    """Attention kernel of the framework, where a config names none. `TORCHS`: also where it says
    `sdpa`.
    """
    fused_loss: bool | str = False
    """The loss is one kernel that overwrites its logits, where a config does not say. `LARGE`: it
    makes no float32 copy of large logits.
    """
    schedules: tuple[str, ...] | None = None
    """None: any, those that a user wrote too."""
    tensor_modes: tuple[str, ...] = TENSOR_MODES
    sequence_parallel: bool = True
    data: tuple[DataStrategy, ...] = DATA_STRATEGIES
    contexts: tuple[str, ...] = CONTEXT_STRATEGIES
    experts: bool = True
    folds_experts: bool = False
    """Experts may take their ranks from dp x cp x tp."""
    staged_data: tuple[DataStrategy, ...] = DATA_STRATEGIES
    """Data strategies that go with a pipeline."""
    replicates_alone: bool = False
    """All-reduce over the data axis goes with no other axis."""

    def with_kernels(self, model: JsonMapping) -> JsonMapping:
        """`[model]` with the kernels of the framework, where it names none."""
        own: dict[str, JsonValue] = {}
        if self.attention != SDPA:
            own["attn_implementation"] = self.attention
        if self.fused_loss:
            own["fused_cross_entropy"] = self.fused_loss
        named = model
        if self.attention == TORCHS and model.get("attn_implementation") == SDPA:
            named = {**model, "attn_implementation": TORCHS}
        return {**own, **named}

    def offers(self, plan: Plan) -> bool:
        """Whether the framework has every part of the plan."""
        tp = plan.tp
        dp = plan.dp
        pp = plan.pp
        cp = plan.cp
        return all(
            (
                tp.size == 1
                or (
                    tp.mode in self.tensor_modes
                    and (self.sequence_parallel or not tp.sequence_parallel)
                ),
                pp.size == 1 or self.schedules is None or pp.schedule in self.schedules,
                (dp.size == 1 and dp.strategy == "allreduce") or dp.strategy in self.data,
                pp.size == 1 or dp.size == 1 or dp.strategy in self.staged_data,
                dp.strategy != "allreduce"
                or not self.replicates_alone
                or dp.size in (1, plan.world_size),
                cp.size == 1 or cp.strategy in self.contexts,
                plan.ep == 1 or self.experts,
                self.folds_experts or not plan.folds_experts,
            )
        )


def behaviour(gradient_bytes: float, **habits: Any) -> Runtime:
    """A framework other than plait. It gathers again what sequence parallelism gathered, and its
    selective recomputation only repeats the attention itself.
    """
    return Runtime(
        gradient_bytes,
        **{
            "keep_gathered": False,
            "selective_sends": False,
            "fused_rows": False,
            "copies_gradients": False,
            "one_pass_update": False,
            **habits,
        },
    )


PLAIT = Framework("plait", attention=TORCHS, fused_loss=LARGE)
MEGATRON_LM = Framework(
    "megatron-lm-2021",
    behaviour(
        4.0,
        bucket_numbers=WHOLE,
        overlap_gradients=False,
        overlap_sends=False,
        stage_cut="layers",
        scatters_sends=True,
        fused_kernels=True,
    ),
    attention="eager",
    schedules=schedules_of("megatron-lm"),
    tensor_modes=("1d",),
    sequence_parallel=False,
    data=("allreduce",),
    contexts=(),
    experts=False,
)
"""Narayanan et al. 2021: attention that is not fused, fused bias-gelu and softmax, float32
gradients, reduction after the last backward, blocking sends.
"""
MEGATRON_2022 = replace(
    MEGATRON_LM,
    name="megatron-lm-2022",
    runtime=replace(MEGATRON_LM.runtime, fused_accumulation=True),
    sequence_parallel=True,
    data=("allreduce", ZERO[1]),
)
"""Megatron-LM with sequence parallelism (Korthikanti et al. 2022), gradients added up inside the
products that make them, and a distributed optimizer.
"""
MEGATRON_DEEPSPEED = replace(
    MEGATRON_LM,
    name="megatron-deepspeed",
    runtime=replace(MEGATRON_LM.runtime, bucket_numbers=5e8, reduces_whole=True, late_seconds=LATE),
    schedules=schedules_of("deepspeed"),
    data=("allreduce", ZERO[1]),
)
"""DeepSpeed's optimizer for bf16 under pipelines: float32 gradients are all-reduced whole, weights
gathered. Its pipeline sends each rank's part of what a tensor group holds (`PartitionedTensor`) and
waits for the device at every send.
"""
MEGATRON_CORE = Framework(
    "megatron-core",
    behaviour(
        2.0,
        bucket_numbers=40e6,
        stage_cut="layers",
        overlap_tensor=0.8,
        fused_accumulation=True,
        fused_kernels=True,
    ),
    attention="cudnn",
    schedules=schedules_of("megatron-lm"),
    tensor_modes=("1d",),
    data=("allreduce", ZERO[1]),
    folds_experts=True,
)
"""Transformer Engine: fused attention and norms; tensor-parallel collectives split and overlapped
with their products. Gradients are added up inside the products that make them, and reduced in
buckets of 40 million (`DistributedDataParallelConfig`). Its ranks of experts are those of tensor,
context and data axes together (`expert_tensor_parallel_size` 1).
"""
NANOTRON = Framework(
    "nanotron",
    behaviour(
        4.0,
        overlap_sends=False,
        hides_regather=True,
        runs_ahead=True,
        stage_cut="filled",
        skew_seconds=SKEW,
        whole_gradient_bytes=2.0,
    ),
    schedules=schedules_of("nanotron"),
    tensor_modes=("1d",),
    data=("allreduce", ZERO[1]),
    contexts=(),
    experts=False,
)
"""bf16 gradients of a whole backward are added to those in float32 (`FP32GradientAccumulator`).
Inputs of column-parallel layers are gathered again (`tp_recompute_allgather`). The outputs of
row-parallel layers are reduced on another stream (`_RowLinearAsyncCommunication`).
"""
TORCHTITAN = Framework(
    "torchtitan",
    behaviour(2.0, repeated_products=0.5),
    schedules=schedules_of("torchtitan"),
    tensor_modes=("1d",),
    data=("allreduce", ZERO[3]),
    contexts=("ring",),
    replicates_alone=True,
)
"""Fully sharded, or sharded inside groups and replicated across: its plain data parallelism goes
with no other axis.
"""
FSDP = Framework(
    "fsdp",
    behaviour(2.0),
    schedules=(),
    tensor_modes=(),
    data=("allreduce", ZERO[2], ZERO[3]),
    contexts=(),
    experts=False,
)
"""PyTorch's fully sharded data parallel with gradients in the working precision, as trainers of one
axis use it.
"""
LLM_FOUNDRY = replace(FSDP, name="llm-foundry", attention="triton", fused_loss=True)
"""The published benchmarks ran the first FlashAttention, written in Triton
(`scripts/train/benchmarking/submit_benchmarks.py`). Its loss is FlashAttention's by default
(`loss_fn: fused_crossentropy` of `models/mpt/modeling_mpt.py`), which overwrites its logits.
"""
DEEPSPEED = Framework(
    "deepspeed",
    behaviour(2.0, bucket_numbers=5e8, overlap_gradients=False, overlap_sends=False),
    schedules=schedules_of("deepspeed"),
    tensor_modes=("1d",),
    sequence_parallel=False,
    data=("allreduce", ZERO[1], ZERO[2], ZERO[3]),
    staged_data=("allreduce", ZERO[1]),
    contexts=("ulysses",),
)
"""ZeRO with the defaults of `runtime/zero/config.py`: buckets of 5e8 numbers, which stages 1 and 2
reduce after backward. AutoTP without sequence parallelism; pipelines with ZeRO-1 at most
(`runtime/pipe/engine.py`).
"""
ACCELERATE = Framework(
    "accelerate",
    behaviour(2.0),
    schedules=(),
    tensor_modes=("1d",),
    sequence_parallel=False,
    data=("allreduce", ZERO[2], ZERO[3]),
    contexts=("ring",),
    experts=False,
)
"""FSDP2 as Hugging Face's Accelerate sets it: `ParallelismConfig` has replicas, shards, a tensor
and a context axis, and no pipeline. `reshard_after_forward` says whether it is ZeRO-3 or ZeRO-2.
"""
MAXTEXT = Framework(
    "maxtext",
    behaviour(4.0, fused_kernels=True),
    attention="cudnn",
    schedules=(PLAIN_SCHEDULE,),
    tensor_modes=("1d",),
    data=("allreduce", ZERO[3]),
    contexts=("ring",),
)
"""Kernels fused by XLA, gradients in float32 (`grad_dtype` of `configs/base.yml`). Its axes are
data, fsdp, tensor, context and expert. Its pipeline runs all forwards before a backward.
"""
HAI_LLM = Framework(
    "hai-llm",
    behaviour(
        4.0,
        fused_kernels=True,
        fused_accumulation=True,
        repeats_latents=True,
        overlap_expert=1.0,
        expert_traffic=0.375,
        compute_share=112 / 132,
    ),
    attention="cudnn",
    schedules=schedules_of("hai-llm"),
    tensor_modes=(),
    data=("allreduce", ZERO[1]),
    contexts=(),
)
"""DeepSeek's own (DeepSeek-V3, arXiv 2412.19437). DualPipe hides dispatch and combine (3.2.1).
20 of 132 units of a device only send (3.2.2). Each token travels to four nodes for its eight
experts (2.1.2). It goes in eight bits and returns in bf16, a quarter and a half of its bytes.
Gradients are float32 (3.3.3).
"""

FRAMEWORKS = {
    one.name: one
    for one in (
        PLAIT,
        MEGATRON_CORE,
        MEGATRON_LM,
        MEGATRON_2022,
        MEGATRON_DEEPSPEED,
        NANOTRON,
        TORCHTITAN,
        FSDP,
        LLM_FOUNDRY,
        DEEPSPEED,
        ACCELERATE,
        MAXTEXT,
        HAI_LLM,
    )
}
ALIASES = {
    **dict.fromkeys(("megatron", "megatron-lm", "megatron-bridge", "nemo"), "megatron-core"),
    "fsdp2": "fsdp",
    "accelerate-fsdp2": "accelerate",
}


def framework_of(name: Framework | str) -> Framework:
    """The framework of that name, capitals and underscores aside. Raises `ConfigError` for one that
    is not known.
    """
    if isinstance(name, Framework):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"framework is a name, as 'plait', not {name!r}")
    word = name.strip().lower().replace("_", "-")
    word = ALIASES.get(word, word)
    if word not in FRAMEWORKS:
        raise ConfigError(f"framework {name!r} is unknown; {nearest(word, FRAMEWORKS)}")
    return FRAMEWORKS[word]
