"""DeepSpeed's JSON configuration.

Keys as in deepspeed's `runtime/constants.py`, `runtime/zero/config.py` and its page
"DeepSpeed Configuration JSON".
"""

from __future__ import annotations

from typing import Final

from plait.interop.draft import ZERO_STRATEGIES, Draft
from plait.interop.optimizers import adopt_optimizer, adopt_schedule
from plait.interop.source import Imported, Kind, Source

KNOB: Final = "a setting of DeepSpeed's own implementation; results do not depend on it"
LOG: Final = "output of DeepSpeed's own logging; plait writes metrics.jsonl and trace.json"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("zero_optimization.offload_param.*", "ignored", "plait keeps parameters on the device"),
    ("zero_optimization.offload_optimizer.*", "ignored", KNOB),
    (
        "zero_optimization.zero_quantized_*",
        "different",
        "ZeRO++ sends rounded values there; plait sends them whole",
    ),
    ("zero_optimization.zeropp_*", "different", "ZeRO++ sends rounded values there"),
    ("zero_optimization.*", "ignored", KNOB),
    ("fp16.*", "ignored", "the dynamic loss scale of plait has its own first value and rhythm"),
    ("bf16.*", "ignored", KNOB),
    ("amp.*", "ignored", "apex's mixed precision; use precision:bf16 or train.float16"),
    ("data_types.*", "ignored", "plait adds up gradients in float32"),
    ("communication_data_type", "different", "DeepSpeed reduces in this type; plait in float32"),
    ("prescale_gradients", "ignored", KNOB),
    ("gradient_predivide_factor", "ignored", KNOB),
    ("sparse_gradients", "ignored", KNOB),
    ("activation_checkpointing.*", "different", "the model's code decides there; use remat:full"),
    ("activation_checkpointing", "different", "the model's code decides there; use remat:full"),
    ("compile.*", "ignored", "compilation starts in code there; here the plan says compile"),
    ("pipeline.*", "ignored", KNOB),
    ("curriculum_learning.*", "different", "the order of data is another there"),
    ("data_efficiency.*", "different", "the order of data is another there"),
    ("progressive_layer_drop.*", "different", "layers are left out at random there"),
    ("eigenvalue.*", "ignored", LOG),
    ("quantize_training.*", "different", "weights are rounded while training there"),
    ("compression_training.*", "different", "weights are rounded or pruned there"),
    ("sparse_attention.*", "different", "attention leaves out blocks there"),
    ("elasticity.*", "ignored", "the batch follows the world there; here [train] says it"),
    ("autotuning.*", "ignored", "plait plan chooses without trial runs"),
    ("torch_autocast.*", "different", "single operations are bf16 there; write precision:bf16"),
    ("expert_parallel.*", "different", "experts are split by the plan here: write epN"),
    ("cuda_visible_devices", "ignored", "the launcher says it"),
    ("tensor_parallel.*", "ignored", KNOB),
    ("hybrid_engine.*", "ignored", KNOB),
    ("aio.*", "ignored", KNOB),
    ("checkpoint.*", "ignored", "plait's checkpoints load under every plan"),
    ("nebula.*", "ignored", "plait has its own checkpoints"),
    ("zero_allow_untested_optimizer", "ignored", KNOB),
    ("zero_force_ds_cpu_optimizer", "ignored", KNOB),
    ("graph_harvesting", "ignored", KNOB),
    ("timers.*", "ignored", LOG),
    ("use_data_before_expert_parallelism", "ignored", KNOB),
    ("dataloader_drop_last", "ignored", "plait's steps always have the whole global batch"),
    *(
        (name, "ignored", LOG)
        for name in (
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "memory_breakdown",
            "flops_profiler.*",
            "tensorboard.*",
            "wandb.*",
            "comet.*",
            "csv_monitor.*",
            "monitor_config.*",
            "comms_logger.*",
            "disable_allgather",
        )
    ),
)
BATCH_KEYS: Final = {
    "global_batch": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batches": "gradient_accumulation_steps",
}
"""The key of each number of the batch, by its field of a draft."""


def read(source: Source) -> Imported:
    """The plan and the config of a DeepSpeed configuration. Errors: `ConfigError`."""
    draft = Draft(source)
    _adopt(source, draft)
    return draft.finish(
        {"global": "train_batch_size", "micro": "train_micro_batch_size_per_gpu"},
    )


def adopt_below(source: Source, draft: Draft, prefix: str) -> bool:
    """Adopt the DeepSpeed configuration whose keys stand below `prefix` in another framework's
    file; whether there are any. What it says counts. Errors: `ConfigError`.
    """
    inner = source.below(prefix, "deepspeed")
    if not inner.values:
        return False
    told = {field: getattr(draft, field) for field in BATCH_KEYS}
    _adopt(inner, draft)
    for field, key in BATCH_KEYS.items():
        before, after = told[field], getattr(draft, field)
        if before is not None and after != before:
            reason = f"the file that names this one says {before}; {after} is taken"
            inner.note(key, "contradictory", reason)
    inner.finish()
    source.join(prefix, inner)
    return True


def word_on_file(source: Source, file: str, guess: str) -> tuple[Kind, str]:
    """The word on a DeepSpeed file that another file names; `guess` is the strategy without it."""
    if source.under(file):
        return "ignored", "its keys are imported as well"
    return (
        "different",
        f"{file} is not there, seen from the folder of the file that names it or one above, so its "
        f"ZeRO stage is unknown and {guess} is a guess; put it there, or ask plait import {file} "
        "--from deepspeed and write its dp term into plan.text",
    )


def _adopt(source: Source, draft: Draft) -> None:
    """Fill a draft with what a configuration says; what it leaves open stays as it is."""
    accumulation = source.count("gradient_accumulation_steps")
    draft.global_batch = _or(source.count("train_batch_size"), draft.global_batch)
    micro = source.count("train_micro_batch_size_per_gpu")
    draft.micro_batch_size = _or(micro, draft.micro_batch_size)
    draft.micro_batches = _or(accumulation, draft.micro_batches)
    if accumulation is not None and accumulation > 1:
        source.note(
            "gradient_accumulation_steps",
            "different",
            "mapped to mb; DeepSpeed takes the mean of micro-batches' means, plait the mean over "
            "all tokens: with padding the losses differ",
        )
    _zero(source, draft)
    _precision(source, draft)
    tensor_keys = ("tensor_parallel.autotp_size", "tensor_parallel.tp_size")
    draft.tp = source.size(*tensor_keys, default=draft.tp)
    if "sequence_parallel_size" in source:
        draft.cp = source.size("sequence_parallel_size", default=draft.cp)
        draft.context = "ulysses"
    draft.pp = source.size("pipeline.stages", default=draft.pp)
    clip = source.number("gradient_clipping")
    draft.put("train", clip_grad_norm=clip or None, seed=source.count("seed"))
    adopt_optimizer(source, draft, "optimizer.type", "optimizer.params")
    adopt_schedule(source, draft, "scheduler.type", "scheduler.params")
    source.note_all(NOTES)


def _or(value: int | None, otherwise: int | None) -> int | None:
    """A number of the file, or what is known already where it has none."""
    return otherwise if value is None else value


def _zero(source: Source, draft: Draft) -> None:
    stage = source.count("zero_optimization.stage") or 0
    if not 0 <= stage < len(ZERO_STRATEGIES):
        source.note("zero_optimization.stage", "contradictory", "a ZeRO stage is 0, 1, 2 or 3")
        stage = 0
    draft.strategy = ZERO_STRATEGIES[stage]
    device = source.take("zero_optimization.offload_optimizer.device")
    if device == "nvme":
        source.note(
            "zero_optimization.offload_optimizer.device",
            "different",
            "plait offloads to host memory, not to a disk",
        )
    draft.offload = device in ("cpu", "nvme") and stage > 0
    if device in ("cpu", "nvme") and stage == 0:
        source.note(
            "zero_optimization.offload_optimizer.device",
            "contradictory",
            "offload needs a ZeRO stage of 1 or more",
        )
    shard = source.count("zero_optimization.zero_hpz_partition_size")
    if shard is not None and shard > 1:
        source.note(
            "zero_optimization.zero_hpz_partition_size",
            "different",
            "hpZ keeps weights a second time; in plait, replicateM shards inside a group instead",
        )
    mics = source.count("zero_optimization.mics_shard_size")
    if mics is not None and mics > 0:
        source.note(
            "zero_optimization.mics_shard_size",
            "different",
            "write dpN:zero3,replicateM with M = data ranks / this size",
        )


def _precision(source: Source, draft: Draft) -> None:
    bf16 = source.flag("bf16.enabled", "bfloat16.enabled") or draft.precision == "bf16"
    fp16 = source.flag("fp16.enabled")
    if bf16 and fp16:
        source.note("fp16.enabled", "contradictory", "bf16 is enabled beside it; bf16 is taken")
    if bf16:
        draft.precision = "bf16"
    elif fp16:
        draft.put("train", float16=True)
