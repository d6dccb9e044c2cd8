"""nanotron's YAML. Keys as in nanotron's `config/config.py` and `config/parallelism_config.py`."""

from __future__ import annotations

from typing import Final

from plait.interop.draft import (
    PLAIN_SCHEDULE,
    SCHEDULE_BY_TORCH_NAME,
    ZERO_STRATEGIES,
    Draft,
)
from plait.interop.optimizers import adopt_name
from plait.interop.source import Imported, Kind, Source
from plait.values import JsonObject

LOG: Final = "output of nanotron's own logging; plait writes metrics.jsonl and trace.json"
KNOB: Final = "a setting of nanotron's own implementation; results do not depend on it"
FILES: Final = "nanotron's own folders; plait writes into --out"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("checkpoints.*", "ignored", FILES),
    ("general.*", "ignored", LOG),
    ("logging.*", "ignored", LOG),
    ("metrics_logging*", "ignored", LOG),
    ("doremi.*", "different", "DoReMi changes the weights of data sets while training"),
    ("profiler*", "ignored", LOG),
    ("lighteval*", "ignored", "see [eval]"),
    ("data_stages*", "ignored", "data comes by [data]"),
    ("data.*", "ignored", "data comes by [data]"),
    ("tokenizer.*", "ignored", "data.tokenizer names the tokenizer"),
    ("s3_upload*", "ignored", FILES),
    ("experimental_logger*", "ignored", LOG),
    ("model.ddp_bucket_cap_mb", "ignored", KNOB),
    ("model.init_method.*", "different", "initial values are those of plait's models"),
    ("model.make_vocab_size_divisible_by", "different", "the vocabulary is padded there"),
    ("model.model_config.*", "ignored", "no effect on the mathematics of training"),
    ("optimizer.learning_rate_scheduler.*", "ignored", "plait has constant, linear and cosine"),
    ("optimizer.optimizer_factory.*", "ignored", KNOB),
    ("optimizer.accumulate_grad_in_fp32", "ignored", "plait always does"),
    ("optimizer.weight_decay_exclude_named_params", "different", "see train.no_decay"),
    ("optimizer.*", "ignored", KNOB),
    ("parallelism.*", "ignored", KNOB),
    ("tokens.*", "ignored", KNOB),
)


def read(source: Source) -> Imported:
    """The plan and the config of a nanotron YAML. Errors: `ConfigError`."""
    draft = Draft(source)
    draft.dp = source.size("parallelism.dp")
    draft.tp = source.size("parallelism.tp")
    draft.pp = source.size("parallelism.pp")
    draft.cp = source.size("parallelism.context_parallel_size")
    draft.ep = source.size("parallelism.expert_parallel_size")
    mode = str(source.take("parallelism.tp_mode") or "ALL_REDUCE").upper()
    draft.sequence_parallel = mode == "REDUCE_SCATTER" and draft.tp > 1
    _pipeline(source, draft)
    _batch(source, draft)
    _optimizer(source, draft)
    _model(source, draft)
    source.note_all(NOTES)
    return draft.finish({"global": "the global batch", "micro": "tokens.micro_batch_size"})


def _pipeline(source: Source, draft: Draft) -> None:
    engine = str(source.take("parallelism.pp_engine") or PLAIN_SCHEDULE).lower()
    words = "GPipe" if engine == "afab" else engine  # all forwards, all backwards
    draft.schedule = SCHEDULE_BY_TORCH_NAME.get(words.lower(), PLAIN_SCHEDULE)
    if source.flag("parallelism.recompute_layer"):
        draft.remat = "full"


def _batch(source: Source, draft: Draft) -> None:
    draft.micro_batch_size = source.count("tokens.micro_batch_size")
    draft.micro_batches = source.count("tokens.batch_accumulation_per_replica")
    draft.put("data", seq_len=source.count("tokens.sequence_length"))
    draft.put("train", steps=source.count("tokens.train_steps"), seed=source.count("general.seed"))


def _optimizer(source: Source, draft: Draft) -> None:
    stage = source.count("optimizer.zero_stage") or 0
    if not 0 <= stage < len(ZERO_STRATEGIES):
        source.note("optimizer.zero_stage", "contradictory", "a ZeRO stage is 0, 1, 2 or 3")
        stage = 0
    draft.strategy = ZERO_STRATEGIES[stage]
    factory = "optimizer.optimizer_factory"
    adopt_name(source, draft, f"{factory}.name", source.take(f"{factory}.name"))
    beta1 = source.number(f"{factory}.adam_beta1")
    beta2 = source.number(f"{factory}.adam_beta2")
    if beta1 is not None and beta2 is not None:
        draft.put("train", betas=[beta1, beta2])
    course = "optimizer.learning_rate_scheduler"
    style = source.take(f"{course}.lr_decay_style")
    if style in ("linear", "cosine"):
        draft.put("train", schedule=style)
    elif style is not None:
        source.note(f"{course}.lr_decay_style", "ignored", "plait has linear and cosine decay")
    draft.put(
        "train",
        eps=source.number(f"{factory}.adam_eps"),
        lr=source.number(f"{course}.learning_rate"),
        min_lr=source.number(f"{course}.min_decay_lr"),
        warmup_steps=source.count(f"{course}.lr_warmup_steps"),
        weight_decay=source.number("optimizer.weight_decay"),
        clip_grad_norm=source.number("optimizer.clip_grad"),
    )


def _model(source: Source, draft: Draft) -> None:
    prefix = "model.model_config."
    dtype = source.take("model.dtype")
    if dtype == "bfloat16":
        draft.precision = "bf16"
    elif dtype == "float16":
        draft.put("train", float16=True)
    if f"{prefix}hidden_size" not in source:
        return
    names = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "max_position_embeddings"),
    )
    values: JsonObject = {name: source.count(f"{prefix}{name}") for name in names}
    tied = source.take(f"{prefix}tie_word_embeddings")
    draft.put(
        "model",
        name="llama",
        **values,
        rope_theta=source.number(f"{prefix}rope_theta"),
        rms_norm_eps=source.number(f"{prefix}rms_norm_eps"),
        tie_word_embeddings=None if tied is None else bool(tied),
    )
    if source.take(f"{prefix}hidden_act") not in (None, "silu"):
        source.note(f"{prefix}hidden_act", "different", "llama has SiLU")
