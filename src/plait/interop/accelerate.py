"""Hugging Face Accelerate's YAML, as `accelerate config` writes it.

Keys as in accelerate's `commands/config/config_args.py` and `utils/dataclasses.py`.
"""

from __future__ import annotations

from typing import Final

from plait.interop.deepspeed import adopt_below, word_on_file
from plait.interop.draft import ZERO_STRATEGIES, Draft
from plait.interop.source import Imported, Kind, Source

LAUNCH: Final = "an option of the launcher; plait train --nproc or torchrun takes its place"
KNOB: Final = "a setting of the wrapped implementation; results do not depend on it"
CLOUD: Final = "a setting of the place where the job runs"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("compute_environment", "ignored", CLOUD),
    ("debug", "ignored", LAUNCH),
    ("downcast_bf16", "ignored", CLOUD),
    ("enable_cpu_affinity", "ignored", LAUNCH),
    *((name, "ignored", LAUNCH) for name in ("machine_rank", "main_*", "rdzv_*", "same_network")),
    *((name, "ignored", LAUNCH) for name in ("gpu_ids", "use_cpu", "num_cpu_threads_per_process")),
    *(
        (name, "ignored", LAUNCH)
        for name in ("max_restarts", "monitor_interval", "main_training_function")
    ),
    *(
        (name, "ignored", CLOUD)
        for name in ("tpu_*", "ipex_config*", "mpirun_config*", "sagemaker*")
    ),
    *(
        (name, "ignored", CLOUD)
        for name in ("ec2_*", "aws_*", "iam_*", "region", "base_job_name", "vm", "env", "image_uri")
    ),
    *(
        (name, "ignored", CLOUD)
        for name in ("profile", "pytorch_version", "transformers_version", "py_version")
    ),
    ("fsdp_config.*", "ignored", KNOB),
    ("deepspeed_config.*", "ignored", KNOB),
    ("megatron_lm_config.*", "ignored", KNOB),
    ("parallelism_config.*", "ignored", KNOB),
    ("dynamo_config.*", "ignored", KNOB),
    ("fp8_config.*", "different", "products in 8 bits round there"),
    ("fp8_config", "different", "products in 8 bits round there"),
    ("additional_args*", "ignored", CLOUD),
    ("commands", "ignored", CLOUD),
    ("command_file", "ignored", CLOUD),
)
EMPTY: Final = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config")


def read(source: Source) -> Imported:
    """The plan of an Accelerate configuration. Errors: `ConfigError`."""
    draft = Draft(source)
    processes = source.count("num_processes")
    source.count("num_machines")
    if source.world_size is None:
        source.world_size = processes
    kind = str(source.take("distributed_type") or "NO").upper()
    if kind == "NO" and source.flag("use_fsdp"):
        kind = "FSDP"
    _precision(source, draft)
    readers = {"FSDP": _fsdp, "DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron}
    if kind in readers:
        readers[kind](source, draft)
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU"):
        source.note("distributed_type", "ignored", "plait runs on CPUs and CUDA devices")
    if kind != "DEEPSPEED":
        file = source.values.get("deepspeed_config.deepspeed_config_file")
        source.note_all(((f"{file}.*", "ignored", "distributed_type is another than DEEPSPEED"),))
    _axes(source, draft)
    draft.compile = str(source.take("dynamo_config.dynamo_backend") or "NO").upper() != "NO"
    for key in EMPTY:
        if key in source and source.values[key] in ({}, None, ""):
            source.take(key)
    source.note_all(NOTES)
    return draft.finish()


def _precision(source: Source, draft: Draft) -> None:
    word = str(source.take("mixed_precision") or "no").lower()
    if word == "bf16":
        draft.precision = "bf16"
    elif word == "fp16":
        draft.put("train", float16=True)
    elif word == "fp8":
        source.note("mixed_precision", "different", "8-bit products round there; bf16 is taken")
        draft.precision = "bf16"
    steps = source.count("gradient_accumulation_steps")
    if steps is not None:
        draft.micro_batches = steps
    draft.put("train", clip_grad_norm=source.number("gradient_clipping"))


def _fsdp(source: Source, draft: Draft) -> None:
    prefix = "fsdp_config.fsdp_"
    word = str(source.take(f"{prefix}sharding_strategy") or "").upper()
    names = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    word = names.get(word, word)
    reshard = source.take(f"{prefix}reshard_after_forward")
    if str(reshard).upper() in (*names.values(), "HYBRID_SHARD_ZERO2"):  # before version 2
        word = word or str(reshard).upper()
        reshard = None
    draft.strategy = ZERO_STRATEGIES[3]
    if word in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or str(reshard).lower() == "false":
        draft.strategy = ZERO_STRATEGIES[2]
    if word == "NO_SHARD":
        draft.strategy = "allreduce"
    if word.startswith("HYBRID"):
        nodes = source.count("num_machines") or 1
        draft.replicate = nodes
    draft.offload = source.flag(f"{prefix}offload_params") and draft.strategy != "allreduce"
    if draft.offload:
        source.note(
            f"{prefix}offload_params",
            "different",
            "mapped to offload; FSDP offloads weights and gradients as well, plait the "
            "optimizer's state",
        )
    if source.flag(f"{prefix}activation_checkpointing"):
        draft.remat = "full"
    if source.take(f"{prefix}version") in (1, "1", None) and draft.strategy != "allreduce":
        key = f"{prefix}version" if f"{prefix}version" in source else "distributed_type"
        source.note(
            key, "different", "FSDP1 with bf16 computes norms on bf16 shards; plait in float32"
        )


def _deepspeed(source: Source, draft: Draft) -> None:
    prefix = "deepspeed_config."
    stage = source.count(f"{prefix}zero_stage")
    file = source.take(f"{prefix}deepspeed_config_file")
    if file is not None and stage is None:
        word = word_on_file(source, str(file), ZERO_STRATEGIES[2])
        source.note(f"{prefix}deepspeed_config_file", *word)
    stage = 2 if stage is None else stage
    if not 0 <= stage < len(ZERO_STRATEGIES):
        source.note(f"{prefix}zero_stage", "contradictory", "a ZeRO stage is 0, 1, 2 or 3")
        stage = 0
    draft.strategy = ZERO_STRATEGIES[stage]
    device = source.take(f"{prefix}offload_optimizer_device")
    draft.offload = device in ("cpu", "nvme") and stage > 0
    accumulation = source.count(f"{prefix}gradient_accumulation_steps")
    draft.micro_batches = accumulation or draft.micro_batches
    draft.put("train", clip_grad_norm=source.number(f"{prefix}gradient_clipping"))
    if file is not None:
        adopt_below(source, draft, str(file))


def _megatron(source: Source, draft: Draft) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    draft.tp = source.size(f"{prefix}tp_degree")
    draft.pp = source.size(f"{prefix}pp_degree")
    draft.sequence_parallel = source.flag(f"{prefix}sequence_parallelism") and draft.tp > 1
    batches = source.count(f"{prefix}num_micro_batches")
    draft.micro_batches = batches or draft.micro_batches
    if source.flag(f"{prefix}use_distributed_optimizer"):
        draft.strategy = ZERO_STRATEGIES[1]
    if source.flag(f"{prefix}recompute_activations"):
        draft.remat = "selective"
    draft.put("train", clip_grad_norm=source.number(f"{prefix}gradient_clipping"))


def _axes(source: Source, draft: Draft) -> None:
    prefix = "parallelism_config.parallelism_config_"
    replicate = source.count(f"{prefix}dp_replicate_size")
    shard = source.count(f"{prefix}dp_shard_size")
    draft.tp = source.size(f"{prefix}tp_size", default=draft.tp)
    context = source.count(f"{prefix}cp_size")
    ulysses = source.count(f"{prefix}sp_size")
    if ulysses is not None and ulysses > 1:
        draft.cp = ulysses
        draft.context = "ulysses"
    elif context is not None:
        draft.cp = context
    if replicate is None and shard is None:
        return
    draft.dp = (replicate or 1) * (shard or 1)
    if (shard or 1) > 1:
        draft.strategy = ZERO_STRATEGIES[3]
        draft.replicate = replicate or 1
