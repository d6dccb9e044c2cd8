"""Keys that an importer has read and that change nothing in its result.

Reading a key is no proof that its value arrives. So each mapped key is taken out of the file, and
then given other values. One change must alter the plan, the config or a word on another key.
A key that changes nothing is named, so that none is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from plait.errors import ConfigError
from plait.interop.source import Imported, Source, Unmapped
from plait.plan.facts import SCHEDULES
from plait.values import JsonObject, JsonValue

Reader = Callable[[Source], Imported]

WORDS: Final = (
    *("bf16", "fp16", "bfloat16", "float16", "no", "none", "full", "selective", "cpu", "inductor"),
    *("adamw", "sgd", "constant", "linear", "cosine", "interleaved1f1b", "a2a", *SCHEDULES),
    *("FSDP", "DEEPSPEED", "MEGATRON_LM", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "optim"),
    *("optim_grads", "RMSNorm", "rope", "silu", "REDUCE_SCATTER", "ALL_REDUCE", "zero3.json"),
    *("lora", "8B", "llama3", "float32", "block", "log"),
)
"""Words that the frameworks know. Each is tried in place of the word of a file."""
SILENT: Final = (
    "nothing in the plan or the config follows from it beside the other keys of this file"
)


def name_without_effect(
    read: Reader, values: JsonObject, world: int | None, found: Imported
) -> None:
    """Move mapped keys that change nothing to `found.unmapped`.

    `values` are those of the file by dotted key, `world` the number of ranks that the user told.
    """
    named = {item.key for item in found.unmapped}

    def result(changed: JsonObject) -> object:
        """The plan, the config and the words on other keys; an error is one result."""
        try:
            other = read(Source(found.framework, changed, world))
        except ConfigError as error:
            return str(error)
        words = {(item.key, item.kind, item.reason) for item in other.unmapped}
        return other.plan, other.config, words

    wanted = result(dict(values))
    for key in [key for key in found.mapped if key not in named]:
        if not any(result(changed) != wanted for changed in _changes(values, key)):
            found.mapped.remove(key)
            found.unmapped.append(Unmapped(key, values[key], "ignored", SILENT))


def _changes(values: JsonObject, key: str) -> Iterator[JsonObject]:
    """The file without a key, and with other values of it."""
    yield {name: value for name, value in values.items() if name != key}
    for other in _others(values[key]):
        yield {**values, key: other}


def _others(value: JsonValue) -> list[JsonValue]:
    """Other values of the kind that a key has."""
    if isinstance(value, bool):
        return [not value]
    text = str(value).strip().lower()
    if text in ("true", "false", "yes", "no", "on", "off"):
        return [text in ("false", "no", "off"), *WORDS]
    try:
        number = float(text)
    except ValueError:
        return [*WORDS]
    return [2, 4, number * 2, number * 3, number + 1, number / 2, 0, -1]
