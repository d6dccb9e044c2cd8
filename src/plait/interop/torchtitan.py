"""torchtitan's TOML job configuration.

Keys as in torchtitan's `config/job_config.py`.
"""

from __future__ import annotations

from typing import Final

from plait.errors import ConfigError
from plait.interop.draft import (
    INTERLEAVED,
    PLAIN_SCHEDULE,
    SCHEDULE_BY_TORCH_NAME,
    ZERO_STRATEGIES,
    Draft,
)
from plait.interop.optimizers import adopt_name
from plait.interop.source import Imported, Kind, Source
from plait.values import JsonObject

LLAMA3: Final[dict[str, JsonObject]] = {
    "debugmodel": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "intermediate_size": 768,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "405B": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
    },
}
"""The sizes of torchtitan's Llama 3 flavors (`models/llama3`)."""

LOG: Final = "output of torchtitan's own logging; plait writes metrics.jsonl and trace.json"
KNOB: Final = "a setting of torchtitan's own implementation; results do not depend on it"
LOW: Final = "products in 8 bits or fewer round there; plait computes in the plan's precision"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("job.*", "ignored", "names and folders of torchtitan's own output"),
    ("profiling.*", "ignored", LOG),
    ("metrics.*", "ignored", LOG),
    ("checkpoint.*", "ignored", "plait's checkpoints load under every plan; see checkpoint_every"),
    ("comm.*", "ignored", KNOB),
    ("memory_estimation.*", "ignored", "plait estimate predicts memory"),
    ("float8.*", "different", LOW),
    ("mx.*", "different", LOW),
    ("quantize.*", "different", LOW),
    ("model.converters", "different", LOW),
    ("fault_tolerance.*", "ignored", "see [recovery]"),
    ("experimental.*", "ignored", KNOB),
    ("validation.*", "ignored", "see [eval]"),
    ("debug.*", "ignored", KNOB),
    ("model.*", "ignored", "the model's code and files in torchtitan's tree"),
    ("compile.*", "ignored", KNOB),
    ("activation_checkpoint.*", "ignored", KNOB),
    ("training.dataset*", "ignored", "data comes by [data]"),
    ("training.mixed_precision_reduce", "ignored", "plait adds up gradients in float32"),
    ("training.gc_*", "ignored", KNOB),
    ("training.*", "ignored", KNOB),
    ("optimizer.*", "ignored", KNOB),
    ("lr_scheduler.decay_ratio", "different", "the rate is constant there before its decay"),
    ("lr_scheduler.*", "ignored", "plait's courses are constant, linear and cosine"),
    ("parallelism.fsdp_reshard_after_forward", "ignored", KNOB),
    ("parallelism.enable_async_tensor_parallel", "ignored", KNOB),
    ("parallelism.expert_tensor_parallel_degree", "ignored", "tp cuts experts by their roles"),
    ("parallelism.*", "ignored", KNOB),
    ("hf_transformers.*", "different", "a model of transformers; write name = 'hf' in [model]"),
    ("encoder.*", "different", "a model of images, which [model] does not name"),
    ("inference.*", "ignored", "plait trains"),
    ("data.*", "ignored", "data comes by [data]"),
)


BF16: Final = "bfloat16"
LEFT_OUT: Final[JsonObject] = {
    "lr": 8e-4,
    "weight_decay": 0.1,
    "clip_grad_norm": 1.0,
    "warmup_steps": 200,
    "schedule": "linear",
}
"""The values of torchtitan for the keys of training that a file leaves out."""
BETAS: Final = (0.9, 0.95)
"""AdamW's betas there, where a file leaves them out."""


def read(source: Source) -> Imported:
    """The plan and the config of a torchtitan TOML. Errors: `ConfigError`.

    A key that the file leaves out has torchtitan's own value, not plait's.
    """
    draft = Draft(source)
    _axes(source, draft)
    _batch(source, draft)
    _precision(source, draft)
    _training(source, draft)
    _model(source, draft)
    source.note_all(NOTES)
    return draft.finish(
        {"global": "training.global_batch_size", "micro": "the samples of a micro-batch"}
    )


def _axes(source: Source, draft: Draft) -> None:
    draft.tp = source.size("parallelism.tensor_parallel_degree")
    draft.sequence_parallel = draft.tp > 1  # torchtitan's tensor parallel always has it
    if source.flag("parallelism.disable_loss_parallel"):
        source.note("parallelism.disable_loss_parallel", "ignored", KNOB)
    draft.pp = source.size(
        "parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"
    )
    draft.cp = source.size(
        "parallelism.context_parallel_degree", "experimental.context_parallel_degree"
    )
    draft.ep = source.size("parallelism.expert_parallel_degree")
    _data_axis(source, draft)
    name = source.take("parallelism.pipeline_parallel_schedule")
    if name is not None and draft.pp > 1:
        schedule = SCHEDULE_BY_TORCH_NAME.get(str(name).lower())
        if schedule is None:
            source.note(
                "parallelism.pipeline_parallel_schedule",
                "ignored",
                f"no schedule of plait by that name; {PLAIN_SCHEDULE} is taken",
            )
        draft.schedule = schedule or PLAIN_SCHEDULE
        draft.virtual = 2 if schedule == INTERLEAVED else None


def _data_axis(source: Source, draft: Draft) -> None:
    replicate = source.size("parallelism.data_parallel_replicate_degree")
    shard = source.count("parallelism.data_parallel_shard_degree")
    shard = -1 if shard is None else shard
    if shard == -1:
        world = source.world_size
        others = draft.tp * draft.pp * draft.cp * replicate
        if world is not None and world % others == 0:
            shard = world // others
        else:
            source.note(
                "parallelism.data_parallel_shard_degree",
                "different",
                "-1 takes all ranks that are left; say how many there are with --gpus N",
            )
            shard = max(1, draft.ep // replicate)
    if shard < 1:
        raise ConfigError(f"torchtitan: parallelism.data_parallel_shard_degree = {shard}")
    draft.dp = replicate * shard
    if shard > 1:
        draft.strategy = ZERO_STRATEGIES[3]
        draft.replicate = replicate
    offload = source.flag("training.enable_cpu_offload")
    draft.offload = offload and shard > 1
    if draft.offload:
        source.note(
            "training.enable_cpu_offload",
            "different",
            "mapped to offload; torchtitan offloads weights and gradients as well, plait the "
            "optimizer's state",
        )
    elif offload:
        source.note(
            "training.enable_cpu_offload",
            "contradictory",
            "torchtitan offloads with FSDP2 alone, and the shard degree is 1",
        )


def _batch(source: Source, draft: Draft) -> None:
    local = source.count("training.local_batch_size", "training.batch_size")
    whole = source.count("training.global_batch_size")
    part = source.count(
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.pipeline_parallel_microbatches",
    )
    assert draft.dp is not None
    draft.global_batch = whole if whole is not None and whole > 0 else None
    if local is None:
        return
    draft.micro_batch_size = (part or 1) if draft.pp > 1 else local
    if draft.global_batch is None:
        draft.global_batch = local * draft.dp


def _precision(source: Source, draft: Draft) -> None:
    """bf16 unless the file says otherwise, where torchtitan casts at all."""
    said = source.take("training.mixed_precision_param")
    degree = source.values.get("parallelism.data_parallel_shard_degree", -1)
    may_shard = degree == -1 and source.world_size is None
    shards = draft.strategy == ZERO_STRATEGIES[3] or draft.cp > 1 or may_shard
    casts = shards or (draft.tp == 1 and draft.pp == 1)
    if said == BF16 or (said is None and casts):
        draft.precision = "bf16"
    if source.take("training.dtype") == BF16:
        source.note(
            "training.dtype",
            "different",
            "weights are bf16 there; plait's bf16 has float32 masters",
        )


def _optimizer(source: Source, draft: Draft, steps: int | None) -> None:
    given = {
        "lr": source.number("optimizer.lr"),
        "weight_decay": source.number("optimizer.weight_decay"),
        "clip_grad_norm": source.number("training.max_norm"),
        "warmup_steps": source.count("lr_scheduler.warmup_steps", "training.warmup_steps"),
        "schedule": _course(source),
    }
    train = {key: LEFT_OUT[key] if value is None else value for key, value in given.items()}
    factor = source.number("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
    if factor:
        draft.put("train", min_lr=factor * float(train["lr"]))
    if steps is not None:
        train["warmup_steps"] = min(train["warmup_steps"], steps)
    betas = [source.number("optimizer.beta1"), source.number("optimizer.beta2")]
    train["betas"] = [
        known if beta is None else beta for beta, known in zip(betas, BETAS, strict=True)
    ]
    train["clip_grad_norm"] = train["clip_grad_norm"] or None  # 0 there clips nothing here
    draft.put("train", **train, eps=source.number("optimizer.eps"))
    adopt_name(source, draft, "optimizer.name", source.take("optimizer.name") or "AdamW")


def _course(source: Source) -> str | None:
    """The decay of the learning rate that the file names, if plait has it."""
    course = source.take("lr_scheduler.decay_type")
    if course in (None, "linear", "cosine"):
        return None if course is None else str(course)
    source.note(
        "lr_scheduler.decay_type", "different", "plait has linear and cosine decay; linear is taken"
    )
    return None


def _training(source: Source, draft: Draft) -> None:
    steps = source.count("training.steps")
    draft.put("train", steps=steps, seed=source.count("training.seed", "debug.seed"))
    _optimizer(source, draft, steps)
    draft.put("data", seq_len=source.count("training.seq_len"))
    mode = source.take("activation_checkpoint.mode")
    if mode in ("full", "selective"):
        draft.remat = mode
    elif mode not in (None, "none"):
        source.note("activation_checkpoint.mode", "ignored", "plait has none, selective and full")
    option = source.take("activation_checkpoint.selective_ac_option")
    if option is not None and mode == "selective" and option != "op":
        source.note(
            "activation_checkpoint.selective_ac_option",
            "different",
            "whole layers are recomputed there; remat:selective keeps the products of each",
        )
    draft.compile = source.flag("compile.enable", "training.compile")


def _model(source: Source, draft: Draft) -> None:
    name = source.take("model.name")
    flavor = source.take("model.flavor")
    if name is None and flavor is None:
        return
    sizes = LLAMA3.get(str(flavor)) if str(name) == "llama3" else None
    if sizes is None:
        source.note("model.flavor", "ignored", f"the sizes of {name} {flavor} are code there")
        source.note("model.name", "ignored", "write [model] with the sizes of that model")
        return
    draft.put("model", name="llama", vocab_size=128256, rope_theta=500000.0, **sizes)
    draft.put("model", rms_norm_eps=1e-5, max_position_embeddings=131072)
    if flavor == "debugmodel":
        draft.put("model", vocab_size=2048, max_position_embeddings=2048)
