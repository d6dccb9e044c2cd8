"""A plan in the words of other frameworks, and what their words cannot say.

Option names as in NVIDIA/Megatron-LM `megatron/training/arguments.py`, the DeepSpeed configuration
JSON and pytorch/torchtitan's
`[parallelism]`, `[training]` and `[activation_checkpoint]` tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from plait.errors import PlanError, nearest
from plait.plan import Plan
from plait.plan.facts import DEFAULT_SCHEDULE, SCHEDULES, STRATEGIES
from plait.plan.precisions import PRECISION, working
from plait.values import JsonObject

TORCH_NAMES = {"bf16": "bfloat16"}
MEGATRON_ROUNDING: dict[str, list[object]] = {
    "fp8": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "mxfp8": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
    "nvfp4": ["--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"],
}
"""Options of Megatron-LM for products of eight bits and fewer."""


@dataclass
class Exported:
    """The text of the other framework's configuration, and each thing that it cannot express."""

    framework: str
    text: str = ""
    missing: list[str] = field(default_factory=list)
    other_ranks: bool = False
    """An axis is lost, so that what was written is another plan."""

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "framework": self.framework,
            "text": self.text,
            "missing": self.missing,
            "complete": not self.missing,
        }


def export_plan(plan: Plan, framework: str, global_batch: int | None = None) -> Exported:
    """`plan` for "megatron-lm" (or "megatron"), "deepspeed" or "torchtitan". Raises `PlanError` for
    another name, and for `remat:auto`, which is a choice by plait's own numbers.
    """
    name = framework.strip().lower().replace("_", "-")
    name = {"megatron": "megatron-lm", "megatron-core": "megatron-lm"}.get(name, name)
    if name not in EXPORTERS:
        raise PlanError(f"no export for {framework!r}; {nearest(name, EXPORTERS)}")
    if plan.remat == "auto":
        raise PlanError(
            f"plan '{plan}': {name} has one recomputation for all blocks, and remat:auto one for "
            "each; export remat:full or remat:selective"
        )
    return EXPORTERS[name](plan.check(), global_batch or plan.dp.size * plan.micro_batches)


def to_megatron(plan: Plan, global_batch: int) -> Exported:
    """Megatron-LM command-line arguments."""
    out = Exported("megatron-lm")
    words = [
        "--micro-batch-size",
        _samples(plan, global_batch, out),
        "--global-batch-size",
        global_batch,
    ]
    if _tensor_is_1d(plan, out, "Megatron-LM"):
        words += ["--tensor-model-parallel-size", plan.tp.size]
        words += ["--sequence-parallel"] if plan.tp.sequence_parallel else []
    words += ["--pipeline-model-parallel-size", plan.pp.size]
    if plan.pp.size > 1:
        if SCHEDULES[plan.pp.schedule].needs_virtual:
            words += ["--num-virtual-stages-per-pipeline-rank", plan.pp.virtual]
        elif plan.pp.schedule != DEFAULT_SCHEDULE:
            out.missing.append(
                f"{plan.pp}: Megatron-LM runs 1f1b and interleaved; exported as 1f1b"
            )
    if plan.cp.size > 1:
        words += [
            "--context-parallel-size",
            plan.cp.size,
            "--cp-comm-type",
            "p2p" if plan.cp.strategy == "ring" else "a2a",
        ]
    if plan.ep > 1:
        words += ["--expert-model-parallel-size", plan.ep]
        words += ["--expert-tensor-parallel-size", 1] if plan.folds_experts else []
        if plan.tp.size > 1 and not plan.tp.sequence_parallel:
            out.missing.append(
                f"ep{plan.ep} {plan.tp}: Megatron-LM wants sequence parallel beside experts; "
                f"choose tp{plan.tp.size}:1d,sp"
            )
    words += _megatron_data(plan, out)
    if plan.remat == "full":
        words += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            1,
        ]
    elif plan.remat == "selective":
        words += ["--recompute-granularity", "selective"]
        out.missing.append(
            "remat:selective: Megatron-LM recomputes attention only, plait also norms and "
            "activations"
        )
    words += ["--bf16"] if working(plan.precision) == "bf16" else []
    words += MEGATRON_ROUNDING.get(plan.precision, [])
    if plan.precision == "float64":
        out.missing.append("precision:float64: Megatron-LM trains in float32, fp16, bf16 or fp8")
    if plan.compile:
        out.missing.append("compile: Megatron-LM fuses by its own kernels")
    # torchrun gives the number of ranks by this variable; the options do not say it.
    out.text = f"# WORLD_SIZE={plan.world_size}\n{' '.join(str(word) for word in words)}"
    return out


def _megatron_data(plan: Plan, out: Exported) -> list[object]:
    strategy = plan.dp.strategy
    stage = STRATEGIES[strategy].zero_stage
    words = list[object]()
    if stage == 1:
        words = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if plan.dp.replicate > 1:
            words += ["--num-distributed-optimizer-instances", plan.dp.replicate]
    elif stage > 1:
        names = {2: "optim_grads", 3: "optim_grads_params"}
        words = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", names[stage]]
        if plan.dp.replicate > 1:
            words += ["--num-distributed-optimizer-instances", plan.dp.replicate]
    elif strategy != "allreduce":
        out.missing.append(
            f"{plan.dp}: Megatron-LM reduces by all-reduce or shards; exported as all-reduce"
        )
    if plan.dp.offload:
        words += ["--optimizer-cpu-offload"]
    return words


def to_deepspeed(plan: Plan, global_batch: int) -> Exported:
    """A DeepSpeed configuration; its pipeline and tensor degrees are set in code, not in the
    file.
    """
    out = Exported("deepspeed")
    config: JsonObject = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": _samples(plan, global_batch, out),
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": working(plan.precision) == "bf16"},
        "zero_optimization": _deepspeed_zero(plan, out),
        **_deepspeed_layers(plan, out),
    }
    if plan.remat != "none":
        config["activation_checkpointing"] = {
            "partition_activations": False,
            "contiguous_memory_optimization": False,
        }
        out.missing.append(
            f"remat:{plan.remat}: call deepspeed.checkpointing.checkpoint around each block in "
            "the model's code"
        )
    if plan.pp.size > 1:
        out.missing.append(
            f"{plan.pp}: pass num_stages={plan.pp.size} to PipelineModule; DeepSpeed runs 1f1b only"
        )
    if plan.precision == "float64":
        out.missing.append(
            "precision:float64: DeepSpeed trains in float32, fp16 or bf16; exported as float32"
        )
    if PRECISION[plan.precision].rounds_products:
        out.missing.append(
            f"precision:{plan.precision}: DeepSpeed's file has no such word; exported as bf16"
        )
    if plan.compile:
        config["compile"] = {"deepcompile": False}
        out.missing.append(
            "compile: call engine.compile() in the code; the file only says with which compiler"
        )
    out.text = json.dumps(config, indent=2)
    return out


def _deepspeed_zero(plan: Plan, out: Exported) -> dict[str, object]:
    stage = STRATEGIES[plan.dp.strategy].zero_stage
    zero: dict[str, object] = {"stage": stage}
    if plan.dp.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.dp.replicate > 1 and stage == 3:
        zero["zero_hpz_partition_size"] = plan.dp.shard
        out.missing.append(
            f"{plan.dp}: DeepSpeed's hpZ keeps weights twice and shards states over all ranks"
        )
    elif plan.dp.replicate > 1:
        out.missing.append(f"{plan.dp}: DeepSpeed cannot replicate groups of ZeRO-{stage}")
    if stage == 0 and plan.dp.strategy != "allreduce":
        out.missing.append(
            f"{plan.dp}: DeepSpeed has no {plan.dp.strategy}; exported as all-reduce"
        )
    if plan.pp.size > 1 and stage > 1:
        out.missing.append(
            f"{plan.dp} with {plan.pp}: DeepSpeed refuses ZeRO-{stage} with pipelines"
        )
    return zero


def _deepspeed_layers(plan: Plan, out: Exported) -> dict[str, object]:
    config: JsonObject = {}
    if _tensor_is_1d(plan, out, "DeepSpeed") and plan.tp.size > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp.size}
        if plan.tp.sequence_parallel:
            out.missing.append(f"{plan.tp}: DeepSpeed's AutoTP has no sequence parallel")
    if plan.cp.size > 1 and plan.cp.strategy == "ulysses":
        config["sequence_parallel_size"] = plan.cp.size
    elif plan.cp.size > 1:
        out.other_ranks = True
        out.missing.append(
            f"{plan.cp}: DeepSpeed splits sequences by Ulysses, not by a ring; choose "
            f"cp{plan.cp.size}:ulysses"
        )
    if plan.ep > 1:
        out.missing.append(f"ep{plan.ep}: pass ep_size={plan.ep} to deepspeed.moe.layer.MoE")
    return config


def _local_batch(plan: Plan, global_batch: int, out: Exported) -> int:
    """Samples of a data rank: of all micro-batches of a pipeline, else of one."""
    if plan.pp.size > 1:
        return -(-global_batch // plan.dp.size)
    return _samples(plan, global_batch, out)


def to_torchtitan(plan: Plan, global_batch: int) -> Exported:
    """A torchtitan TOML."""
    out = Exported("torchtitan")
    facts = STRATEGIES[plan.dp.strategy]
    shard = plan.dp.shard if facts.shards_parameters else 1
    replicate = plan.dp.size // shard
    lines = [
        "[training]",
        # Without a pipeline torchtitan adds up gradients until the global batch is reached.
        f"local_batch_size = {_local_batch(plan, global_batch, out)}",
        f"global_batch_size = {global_batch}",
        'dtype = "float32"',
        f'mixed_precision_param = "{TORCH_NAMES.get(working(plan.precision), "float32")}"',
        *(["enable_cpu_offload = true"] if plan.dp.offload and facts.shards_parameters else []),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
        f"tensor_parallel_degree = {plan.tp.size if _tensor_is_1d(plan, out, 'torchtitan') else 1}",
        f"pipeline_parallel_degree = {plan.pp.size}",
        f"context_parallel_degree = {plan.cp.size}",
        f"expert_parallel_degree = {plan.ep}",
    ]
    lines += _torchtitan_pipeline(plan, global_batch, out)
    if plan.tp.size > 1 and not plan.tp.sequence_parallel and plan.tp.mode == "1d":
        out.missing.append(
            f"{plan.tp}: torchtitan's tensor parallel always comes with sequence parallel"
        )
    if plan.folds_experts:
        out.missing.append(f"ep{plan.ep} over dp x cp x tp: set expert_tensor_parallel_degree = 1")
    _note_torchtitan_data(plan, shard, out)
    _note_torchtitan_precision(plan, out)
    if plan.cp.strategy == "ulysses" and plan.cp.size > 1:
        out.missing.append(f"{plan.cp}: torchtitan's context parallel is a ring")
    modes = {"none": "none", "full": "full", "selective": "selective"}
    lines += ["", "[activation_checkpoint]", f'mode = "{modes[plan.remat]}"']
    if plan.remat == "selective":
        lines.append('selective_ac_option = "op"')
    lines += ["", "[compile]", f"enable = {str(plan.compile).lower()}"]
    out.text = "\n".join(lines) + "\n"
    return out


def _torchtitan_pipeline(plan: Plan, global_batch: int, out: Exported) -> list[str]:
    """The lines of a pipeline, and what torch's schedules do otherwise."""
    if plan.pp.size == 1:
        return []
    schedule = SCHEDULES[plan.pp.schedule]
    torch_name = schedule.torch_name or SCHEDULES[DEFAULT_SCHEDULE].torch_name
    lines = [
        f'pipeline_parallel_schedule = "{torch_name}"',
        f"pipeline_parallel_microbatch_size = {_samples(plan, global_batch, out)}",
    ]
    if schedule.torch_name is None:
        out.missing.append(f"{plan.pp}: torchtitan has no {plan.pp.schedule}; exported as 1F1B")
    if schedule.needs_virtual and plan.pp.virtual != 2:
        lines.append(
            "# two stages a rank without pipeline_parallel_layers_per_stage = layers / "
            f"{plan.pp.num_stages}"
        )
    if schedule.torch_interleaves:
        out.missing.append(f"{plan.pp}: torch's zero bubble is interleaved, with two stages a rank")
    return lines


def _note_torchtitan_data(plan: Plan, shard: int, out: Exported) -> None:
    """Note the words of a data axis that torchtitan lacks. `shard` ranks share parameters."""
    facts = STRATEGIES[plan.dp.strategy]
    replicate = plan.dp.size // shard
    if facts.shards_optimizer and not facts.shards_parameters:
        out.missing.append(
            f"{plan.dp}: torchtitan shards all (FSDP2) or nothing (DDP); exported as DDP"
        )
    elif plan.dp.strategy != "allreduce" and not facts.shards_parameters:
        out.missing.append(f"{plan.dp}: torchtitan has no {plan.dp.strategy}; exported as DDP")
    if plan.dp.offload:
        whole = (
            "torchtitan offloads weights and gradients as well"
            if facts.shards_parameters
            else "torchtitan offloads with FSDP2 only"
        )
        out.missing.append(f"{plan.dp}: {whole}")
    if facts.shards_parameters and shard == 1 and replicate > 1:
        out.missing.append(f"{plan.dp}: groups of one rank shard nothing; choose dp{replicate}")
    if replicate > 1 and shard == 1 and plan.world_size > plan.dp.size:
        out.missing.append(
            f"{plan.dp}: torchtitan's DDP goes with no other axis; choose dp{plan.dp.size}:zero3"
        )


def _note_torchtitan_precision(plan: Plan, out: Exported) -> None:
    if plan.precision == "float64":
        out.missing.append(
            "precision:float64: torchtitan trains in float32 or bfloat16; exported as float32"
        )
    if PRECISION[plan.precision].rounds_products:
        out.missing.append(
            f"precision:{plan.precision}: torchtitan's converters (float8, mx) set it; exported as "
            "bf16"
        )


def _samples(plan: Plan, global_batch: int, out: Exported) -> int:
    shares = plan.dp.size * plan.micro_batches
    if global_batch % shares:
        out.missing.append(
            f"a global batch of {global_batch} does not divide into dp{plan.dp.size} x "
            f"mb{plan.micro_batches}; rounded up"
        )
    return -(-global_batch // shares)


def _tensor_is_1d(plan: Plan, out: Exported, framework: str) -> bool:
    if plan.tp.mode == "1d":
        return True
    out.other_ranks = True
    out.missing.append(
        f"{plan.tp}: {framework} splits layers in one dimension only; choose tp{plan.tp.size}:1d "
        "or leave it out"
    )
    return False


EXPORTERS: dict[str, Callable[[Plan, int], Exported]] = {
    "megatron-lm": to_megatron,
    "deepspeed": to_deepspeed,
    "torchtitan": to_torchtitan,
}
