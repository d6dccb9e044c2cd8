"""YAML of NeMo and of Megatron-Bridge, whose keys are mostly Megatron-LM's options in sections.

NeMo's as in `megatron_gpt_config.yaml`: `trainer` and `model`, which holds `optim` and `data`.
Megatron-Bridge's as in its `ConfigContainer`: `model`, `train`, `optimizer`, `scheduler`, `ddp`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from plait.interop import megatron
from plait.interop.source import Imported, Kind, Source, Unmapped
from plait.values import JsonObject, JsonValue

LOG: Final = "output of the framework's own logging; plait writes metrics.jsonl and trace.json"
KNOB: Final = "a setting of the framework's own implementation; results do not depend on it"
FILES: Final = "the framework's own files; data comes by [data], checkpoints by --resume"
DATA: Final = "data comes by [data]"
OPEN: Final = "a value that another place fills in, which is not known here"
RECIPE: Final = (
    "the file only changes a recipe of Megatron-Bridge, whose other values are not known here: "
    "Megatron-LM's own are taken"
)

OPTION_SECTIONS: Final = (
    *("model", "train", "optimizer", "scheduler", "ddp", "mixed_precision", "rng"),
    *("trainer.strategy", "strategy"),
)
"""Sections whose keys are options of Megatron-LM, with underscores."""

RENAMED: Final = {
    "model.encoder_seq_length": "seq-length",
    "model.override_vocab_size": "vocab-size",
    "model.num_moe_experts": "num-experts",
    "model.rotary_percentage": "rotary-percent",
    "model.activations_checkpoint_granularity": "recompute-granularity",
    "model.activations_checkpoint_method": "recompute-method",
    "model.activations_checkpoint_num_layers": "recompute-num-layers",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "trainer.strategy.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.optim.lr": "lr",
    "model.optim.weight_decay": "weight-decay",
    "model.optim.eps": "adam-eps",
    "model.optim.sched.warmup_steps": "lr-warmup-iters",
    "model.optim.sched.min_lr": "min-lr",
    "trainer.max_steps": "train-iters",
    "trainer.gradient_clip_val": "clip-grad",
    "dataset.sequence_length": "seq-length",
    "dataset.seq_length": "seq-length",
    "data.seq_length": "seq-length",
    "data.global_batch_size": "global-batch-size",
    "data.micro_batch_size": "micro-batch-size",
}
COURSES: Final = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear"}

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("*_target_", "ignored", "the class of the framework that reads this section"),
    ("*._call_", "ignored", KNOB),
    ("exp_manager.*", "ignored", LOG),
    ("logger.*", "ignored", LOG),
    ("profiling.*", "ignored", LOG),
    ("model.nsys_profile.*", "ignored", LOG),
    ("checkpoint.*", "ignored", FILES),
    ("restore_from_path", "ignored", FILES),
    ("name", "ignored", LOG),
    ("model.data.*", "ignored", DATA),
    ("data.*", "ignored", DATA),
    ("dataset.*", "ignored", DATA),
    ("tokenizer.*", "ignored", "data.tokenizer names the tokenizer"),
    ("model.tokenizer.*", "ignored", "data.tokenizer names the tokenizer"),
    ("validation.*", "ignored", "see [eval]"),
    ("dist.*", "ignored", KNOB),
    ("comm_overlap*", "ignored", KNOB),
    ("model.peft.*", "different", "adapters are written in [adapters] here"),
    ("peft.*", "different", "adapters are written in [adapters] here"),
    ("model.optim.sched.*", "ignored", "plait's courses are constant, linear and cosine"),
    ("model.optim.*", "ignored", KNOB),
    ("trainer.accumulate_grad_batches", "ignored", "micro-batches follow from the batch sizes"),
    ("trainer.*", "ignored", KNOB),
)


@dataclass
class _MegatronOptions:
    """Megatron-LM's options as a file gives them, and the file's keys behind each."""

    source: Source
    values: JsonObject = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)

    def put(self, option: str, value: JsonValue, *keys: str) -> None:
        """Set an option for the keys of the file that say it; the first one that says it stays."""
        self.source.taken.update(keys)
        before = self.values.get(option)
        if before is not None and value is not None and str(before) != str(value):
            for key in keys:
                other = self.keys[option][0] if self.keys.get(option) else option
                reason = f"{other} = {before} stands beside it, and is taken"
                self.source.note(key, "contradictory", reason)
            return
        if before is None:
            self.values[option] = value
        self.keys.setdefault(option, []).extend(keys)


def read(source: Source) -> Imported:
    """The plan and the config of a YAML of NeMo or Megatron-Bridge. Errors: `ConfigError`."""
    _fill_in(source)
    options = _MegatronOptions(source)
    _world(options)
    _precision(options)
    _model(options)
    _optimizer(options)
    for key in source.left():
        option = _option_of(key)
        if option is not None:
            options.put(option, source.values[key], key)
    source.note_all(NOTES)
    source.finish()
    names = {option: keys[0] for option, keys in options.keys.items() if keys}
    inner = Source(source.framework, options.values, source.world_size, names=names)
    return _in_own_words(megatron.read(inner), options)


def _in_own_words(found: Imported, options: _MegatronOptions) -> Imported:
    """The result of Megatron-LM's options, under the keys of the file."""
    source = options.source
    unmapped = [
        Unmapped(key, source.values[key], item.kind, item.reason)
        for item in found.unmapped
        for key in options.keys.get(item.key, ())
    ]
    mapped = [key for option in found.mapped for key in options.keys.get(option, ())]
    recipe = [] if source.under("trainer") or "model.num_layers" in source else [RECIPE]
    assumed = [*found.assumed, *recipe]
    return replace(found, mapped=mapped, unmapped=[*unmapped, *source.unmapped], assumed=assumed)


def _fill_in(source: Source) -> None:
    """Put the value of another key where `${section.key}` or `${.key}` names it."""
    for key, value in list(source.values.items()):
        if not isinstance(value, str) or not ("${" in value or value == "???"):
            continue
        named = re.fullmatch(r"\$\{(\.?)(\w[\w.]*)\}", value.strip())
        section = key.rpartition(".")[0]
        other = "" if named is None else named[2]
        other = f"{section}.{other}" if named is not None and named[1] and section else other
        filled = source.values.get(other)
        if filled is None or "${" in str(filled):
            source.note(key, "ignored", OPEN)
        else:
            source.values[key] = filled


def _option_of(key: str) -> str | None:
    """The option of Megatron-LM that a key means."""
    if key in RENAMED:
        return RENAMED[key]
    section, _, name = key.rpartition(".")
    if section not in OPTION_SECTIONS or name.startswith("_"):
        return None
    return name.replace("_", "-")


def _taken(source: Source, key: str) -> bool:
    """Whether a key says something and has not been read yet."""
    return source.values.get(key) is not None and key not in source.taken


def _world(options: _MegatronOptions) -> None:
    source = options.source
    devices, nodes = (source.values.get(f"trainer.{name}") for name in ("devices", "num_nodes"))
    if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):
        options.put("WORLD_SIZE", devices * nodes, "trainer.devices", "trainer.num_nodes")


def _precision(options: _MegatronOptions) -> None:
    """Words such as `bf16-mixed`, `bf16_mixed`, 16."""
    source = options.source
    for key in ("trainer.precision", "mixed_precision", "mixed_precision.dtype"):
        if not _taken(source, key):
            continue
        word = str(source.values[key]).lower()
        options.put("bf16", "bf16" in word, key)
        if "bf16" not in word and "16" in word:
            options.put("fp16", True, key)
        if "fp8" in word or "fp4" in word:
            source.note(key, "different", "products in 8 bits or fewer round there")


def _model(options: _MegatronOptions) -> None:
    """Keys of the model that say the opposite of an option, or its value by another word."""
    source = options.source
    for key, option in (
        ("model.bias", "disable-bias-linear"),
        ("model.add_bias_linear", "disable-bias-linear"),
        ("model.share_embeddings_and_output_weights", "untie-embeddings-and-output-weights"),
    ):
        if _taken(source, key):
            options.put(option, not source.flag(key), key)
    if _taken(source, "model.activation"):
        word = str(source.values["model.activation"])
        options.put("swiglu", word in ("swiglu", "fast-swiglu"), "model.activation")
    function = [key for key in source.values if key.startswith("model.activation_func")]
    names = " ".join(str(source.values[key]) for key in function)
    if _taken(source, "model.gated_linear_unit"):
        is_gated = source.flag("model.gated_linear_unit") and "silu" in names
        named = [key for key in function if "silu" in str(source.values[key])]
        options.put("swiglu", is_gated, "model.gated_linear_unit", *named)
    if _taken(source, "model.normalization"):
        word = str(source.values["model.normalization"])
        is_rms = word.lower() == "rmsnorm"
        options.put("normalization", "RMSNorm" if is_rms else word, "model.normalization")
    if _taken(source, "model.num_query_groups"):
        options.put("group-query-attention", True)


def _optimizer(options: _MegatronOptions) -> None:
    """The optimizer of NeMo in `model.optim`, and what NeMo does where a key is left out."""
    source = options.source
    name_key, course_key, betas_key = (
        f"model.optim.{name}" for name in ("name", "sched.name", "betas")
    )
    if _taken(source, name_key):
        word = str(source.values[name_key])
        is_split = word in ("distributed_fused_adam", "mcore_distributed_optim")
        adam = is_split or word in ("fused_adam", "adam", "adamw", "megatron_fused_adam")
        options.put("optimizer", "adam" if adam else word, name_key)
        if is_split:
            options.put("use-distributed-optimizer", True, name_key)
    betas = source.values.get(betas_key)
    if isinstance(betas, list) and len(betas) == 2:
        options.put("adam-beta1", betas[0], betas_key)
        options.put("adam-beta2", betas[1], betas_key)
    if _taken(source, course_key):
        word = str(source.values[course_key])
        options.put("lr-decay-style", COURSES.get(word, word), course_key)
    if source.under("trainer"):
        if not _taken(source, "trainer.gradient_clip_val"):
            options.put("clip-grad", 0)
        if course_key not in source:
            options.put("lr-decay-style", "constant")
