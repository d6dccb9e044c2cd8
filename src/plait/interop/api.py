"""`import_file` and `import_text`: the framework is found by the keys where no caller says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from plait.errors import ConfigError, nearest
from plait.interop import (
    accelerate,
    axolotl,
    deepspeed,
    files,
    llama_factory,
    megatron,
    nanotron,
    nemo,
    torchtitan,
)
from plait.interop.effects import name_without_effect
from plait.interop.source import Imported, Source
from plait.plan import Plan
from plait.values import JsonMapping, JsonObject

FRAMEWORKS: Final[dict[str, Callable[[Source], Imported]]] = {
    "deepspeed": deepspeed.read,
    "megatron-lm": megatron.read,
    "torchtitan": torchtitan.read,
    "accelerate": accelerate.read,
    "axolotl": axolotl.read,
    "llama-factory": llama_factory.read,
    "nanotron": nanotron.read,
    "nemo": nemo.read,
}

SIGNS: Final[dict[str, tuple[str, ...]]] = {
    "nanotron": ("parallelism.dp", "tokens.micro_batch_size", "checkpoints.checkpoints_path"),
    "torchtitan": (
        "parallelism.data_parallel_shard_degree",
        "parallelism.tensor_parallel_degree",
        "training.local_batch_size",
        "training.seq_len",
        "model.flavor",
    ),
    "accelerate": ("distributed_type", "compute_environment", "num_machines"),
    "axolotl": ("base_model", "micro_batch_size", "sequence_len", "datasets"),
    "llama-factory": (
        "finetuning_type",
        "cutoff_len",
        "dataset_dir",
        "lora_target",
    ),
    "deepspeed": (
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "zero_optimization.stage",
        "bf16.enabled",
        "fp16.enabled",
    ),
    "megatron-lm": ("tensor-model-parallel-size", "micro-batch-size", "num-layers"),
    "nemo": (
        "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size",
        "trainer.strategy.tensor_model_parallel_size",
        "model.micro_batch_size",
        "train.micro_batch_size",
        "train.train_iters",
        "exp_manager",
    ),
}
"""Keys by which a file of each framework is known."""
NOT_READ: Final[dict[str, tuple[str, ...]]] = {
    "MaxText": (
        "per_device_batch_size",
        "base_emb_dim",
        "base_num_decoder_layers",
        "ici_tensor_parallelism",
        "ici_fsdp_parallelism",
        "dcn_data_parallelism",
    ),
    "torchtune": (
        "model._component_",
        "tokenizer._component_",
        "dataset._component_",
        "checkpointer._component_",
        "optimizer._component_",
        "enable_activation_checkpointing",
        "tensor_parallel_dim",
    ),
    "Lightning": (
        "seed_everything",
        "model.class_path",
        "model.init_args",
        "data.class_path",
        "data.init_args",
        "optimizer.class_path",
        "ckpt_path",
    ),
}
"""Keys by which a file of a framework is known that no importer reads; two of them tell."""
ALIASES: Final = {
    "llamafactory": "llama-factory",
    "megatron": "megatron-lm",
    "megatron-core": "megatron-lm",
    "megatron-bridge": "nemo",
}


def import_file(
    path: str | Path, framework: str | None = None, world_size: int | None = None
) -> Imported:
    """The plan and the config that a file of another framework means.

    `framework` is a key of `FRAMEWORKS`; None asks the file's own keys. `world_size` is the number
    of ranks, for files that leave it to the launcher. A DeepSpeed file that it names is read as
    well, where it is there. A relative path begins at the folder of `path`, or at one above it.

    Errors: `ConfigError` for a file that cannot be read, or whose numbers cannot all be true.
    `world_size` is one of these numbers.
    """
    path = Path(path)
    text = files.read_text(path)
    known = _name_of(framework)
    table = _table(text, files.form_of(path, text), known, str(path))
    return _import_table({**table, **_named_file(table, path.parent)}, known, world_size, str(path))


def import_text(
    text: str,
    form: str,
    framework: str | None = None,
    world_size: int | None = None,
    name: str = "the text",
) -> Imported:
    """`import_file` for a text in one form: `json`, `yaml`, `toml` or `shell`.

    Raises:
        ConfigError: a text that cannot be read, has no key, or is of another framework. Or one that
            says another number of ranks than `world_size`.
    """
    known = _name_of(framework)
    return _import_table(_table(text, form, known, name), known, world_size, name)


def _table(text: str, form: str, known: str | None, name: str) -> JsonObject:
    """The keys of a text. Errors: `ConfigError` naming the file."""
    if known == "megatron-lm" and form not in ("yaml", "json"):
        form = "shell"
    try:
        return files.parse(text, form)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _named_file(table: JsonMapping, folder: Path) -> JsonObject:
    """The DeepSpeed file that a table names, as a table below its name.

    Empty where it names none, or the file is not there. A relative path begins at `folder`, or at
    the nearest folder above it. Scripts that start at the top of a checkout name files from there.
    """
    part = table.get("deepspeed_config")
    inner = part.get("deepspeed_config_file") if isinstance(part, Mapping) else None
    for name in (inner, table.get("deepspeed")):
        if not isinstance(name, str) or name in ("", *table):
            continue
        whole = folder.resolve()
        for path in (each / name for each in (folder, *whole.parents)):
            if path.is_file():
                return {name: _table(files.read_text(path), "json", None, str(path))}
    return {}


def _import_table(
    table: JsonObject, known: str | None, world_size: int | None, name: str
) -> Imported:
    if known == "megatron-lm" or "MODEL_ARGS" in table:
        known = "megatron-lm"
        table = megatron.options_of(table)
    source = Source.of(known or "", table, world_size)
    if not source.values:
        raise ConfigError(f"{name}: there is no key in it")
    _refuse_others(source.values, known, name)
    source.framework = known or _guess(source.values, name)
    read = FRAMEWORKS[source.framework]
    imported = read(source)
    unknown = {item.key for item in imported.unmapped if item.kind == "unknown"}
    if unknown >= source.values.keys() or (unknown and _is_of_another(source, imported)):
        raise ConfigError(_of_another(source, name))
    ranks = Plan.parse(imported.plan).world_size
    if world_size is not None and ranks != world_size:
        raise ConfigError(
            f"{name} means {imported.plan}, which is {ranks} ranks, and {world_size} were asked "
            "for; change the sizes in the file, or leave --gpus out"
        )
    name_without_effect(read, source.values, world_size, imported)
    return imported


def _refuse_others(values: JsonMapping, known: str | None, name: str) -> None:
    """Raises `ConfigError` for a file of a framework that no importer reads."""
    votes = _votes(values)
    others = {other: _count(values, signs) for other, signs in NOT_READ.items()}
    best = max(others, key=lambda other: others[other])
    most = votes[known] if known is not None else max(votes.values())
    if others[best] > max(1, most):
        signs = ", ".join(sign for sign in NOT_READ[best] if _has(values, sign))
        raise ConfigError(
            f"{name} is a config of {best} ({signs}), which plait does not read; it reads those "
            f"of {', '.join(FRAMEWORKS)}. Write its sizes by hand: plait config --list has every "
            "key"
        )


def _is_of_another(source: Source, imported: Imported) -> bool:
    """Whether a file gave nothing to the framework that the user named, and looks like another's.

    Names such as `checkpoint.enable` are keys of several frameworks.
    """
    votes = _votes(source.values)
    return not imported.mapped and max(votes.values()) > votes[source.framework]


def _of_another(source: Source, name: str) -> str:
    """Say that no key of a file is mapped as the named framework's, and whose it is."""
    count = len(source.values)
    first = ", ".join(list(source.values)[:3])
    sentence = f"{name}: none of its {count} keys ({first}) is one of {source.framework}"
    votes = _votes(source.values)
    best = max(votes, key=lambda framework: votes[framework])
    if votes[best] and best != source.framework:
        return f"{sentence}; they are those of {best}: say --from {best}, or leave --from out"
    return f"{sentence}; is it the file that was meant?"


def _name_of(framework: str | None) -> str | None:
    if framework is None:
        return None
    word = framework.strip().lower().replace("_", "-")
    word = ALIASES.get(word, word)
    if word not in FRAMEWORKS:
        raise ConfigError(f"nothing is imported from {framework!r}; {nearest(word, FRAMEWORKS)}")
    return word


def _votes(values: JsonMapping) -> dict[str, int]:
    """The signs of each framework that a file has."""
    votes = dict.fromkeys(SIGNS, 0)
    for framework, signs in SIGNS.items():
        votes[framework] = _count(values, signs)
    return votes


def _guess(values: JsonMapping, name: str) -> str:
    votes = _votes(values)
    best = max(votes, key=lambda framework: votes[framework])
    if not votes[best]:
        raise ConfigError(
            f"{name}: no key tells whose config it is; say --from {', '.join(FRAMEWORKS)}"
        )
    return best


def _count(values: JsonMapping, signs: Iterable[str]) -> int:
    return sum(_has(values, sign) for sign in signs)


def _has(values: JsonMapping, sign: str) -> bool:
    return sign in values or any(key.startswith(f"{sign}.") for key in values)
