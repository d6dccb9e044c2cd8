"""The keys of another framework's config, each of which is read once or named as unmapped."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal

from plait.errors import ConfigError
from plait.values import JsonMapping, JsonObject, JsonValue

Kind = Literal["ignored", "contradictory", "different", "unknown"]

AUTO: Final = "auto"
"""The word by which a config leaves a value to its reader."""
UNSET: Final = "a shell variable that the script does not set, or sets in a branch that may not run"
BRANCH: Final = (
    "a branch of the script gives it, whose condition is not known here, or a function or a text "
    "that may not run"
)


class Undecided(str):
    """The value of an option that a script gives where it may not run."""


@dataclass(frozen=True)
class Unmapped:
    """One key that has no place in the result, or means something else there.

    `kind`: `ignored` changes no mathematics here. `different` means something else in the other
    framework. `contradictory` cannot be true beside another key. `unknown` is no key that plait
    knows.
    """

    key: str
    value: JsonValue
    kind: Kind
    reason: str

    def as_dict(self) -> JsonObject:
        """The fields as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Imported:
    """The plan and the config that another framework's file means.

    Attributes:
        plan: the canonical text of the plan.
        config: sections of a plait config; `[model]` is missing where the file names no model.
        mapped: the keys of the file that the result holds.
        unmapped: every other key of the file, with the reason.
        assumed: a sentence for each number that the file does not say and the result needs.
    """

    framework: str
    plan: str
    config: dict[str, JsonObject]
    mapped: list[str]
    unmapped: list[Unmapped]
    assumed: list[str] = field(default_factory=list)

    def as_dict(self) -> JsonObject:
        """The fields as plain data, for `--json`."""
        return asdict(self)


@dataclass
class Source:
    """The values of a file by dotted key, and what has become of each.

    A key is `taken` when an importer has read it. What is left at the end is unknown, so that no
    key is dropped without a word.
    """

    framework: str
    values: JsonObject
    world_size: int | None = None
    """The number of ranks that the user gave; files often do not say it."""
    taken: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    """The taken keys whose values were asked for; the others were only named."""
    unmapped: list[Unmapped] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)
    """The file's own name of each key that an importer has renamed."""

    @staticmethod
    def of(framework: str, table: JsonMapping, world_size: int | None = None) -> Source:
        """The source of a nested table."""
        return Source(framework, _flattened(table), world_size)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def under(self, prefix: str) -> bool:
        """Whether any key begins with a prefix and a dot."""
        return any(key.startswith(f"{prefix}.") for key in self.values)

    def below(self, prefix: str, framework: str) -> Source:
        """The keys below a prefix, without it, as a source of their own."""
        start = f"{prefix}."
        values = {
            key.removeprefix(start): value
            for key, value in self.values.items()
            if key.startswith(start)
        }
        return Source(framework, values, self.world_size)

    def join(self, prefix: str, inner: Source) -> None:
        """Take over what has become of the keys below a prefix."""
        self.taken |= {f"{prefix}.{key}" for key in inner.taken}
        self.read |= {f"{prefix}.{key}" for key in inner.read}
        self.unmapped += [replace(item, key=f"{prefix}.{item.key}") for item in inner.unmapped]

    def take(self, *keys: str) -> JsonValue:
        """The value of the first key that is there and says something; all of them count as read.

        None where no key is there, or its value is null, `auto` or known to a shell alone.
        """
        answer = None
        for key in keys:
            if key not in self.values:
                continue
            value = self.values[key]
            if isinstance(value, str) and value.strip().lower() == AUTO:
                self.note(key, "ignored", "auto leaves the value to the code that reads the file")
                continue
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(value, Undecided) or (isinstance(first, str) and first[:1] == "$"):
                self.note(key, "ignored", BRANCH if isinstance(value, Undecided) else UNSET)
                continue
            self.taken.add(key)
            self.read.add(key)
            if answer is None:
                answer = value
        return answer

    def number(self, *keys: str) -> float | None:
        """`take`, as a number. Errors: `ConfigError` for anything else."""
        value = self.take(*keys)
        if value is None or value == "":
            return None
        if isinstance(value, str) and "$" in value:
            for key in keys:
                if self.values.get(key) is not None:
                    self.note(key, "ignored", UNSET)
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self._named(keys)} = {value!r} is no number") from None

    def count(self, *keys: str) -> int | None:
        """`number`, as a whole number. Errors: `ConfigError` for a fraction."""
        value = self.number(*keys)
        if value is None:
            return None
        if not math.isfinite(value) or value != int(value):
            raise ConfigError(f"{self._named(keys)} = {value!r} is no whole number")
        return int(value)

    def size(self, *keys: str, default: int = 1) -> int:
        """`count` of an axis: at least 1. Errors: `ConfigError` for less."""
        value = self.count(*keys)
        if value is None:
            return default
        if value < 1:
            raise ConfigError(f"{self._named(keys)} = {value}; an axis has one rank or more")
        return value

    def _named(self, keys: Sequence[str]) -> str:
        """The beginning of a sentence about the first of the keys that the file has."""
        key = next((key for key in keys if key in self.values), keys[0])
        return f"{self.framework}: {self.names.get(key, key)}"

    def flag(self, *keys: str) -> bool:
        """`take`, as a truth value: the words of YAML, JSON and command lines."""
        value = self.take(*keys)
        if isinstance(value, str):
            return value.strip().lower() in ("true", "yes", "1", "on")
        return bool(value)

    def note(self, key: str, kind: Kind, reason: str) -> None:
        """Name a key that the result does not hold as it stands."""
        if any(item.key == key and item.reason == reason for item in self.unmapped):
            return
        self.taken.add(key)
        self.unmapped.append(Unmapped(key, self.values.get(key), kind, reason))

    def note_all(self, reasons: Sequence[tuple[str, Kind, str]]) -> None:
        """Name every key that is left and matches a pattern with `*`; the first pattern wins.

        Raises:
            ConfigError: a value where the framework has a table, as the pattern `table.*` says.
        """
        for pattern, kind, reason in reasons:
            for key in self.left():
                if fnmatch.fnmatchcase(key, pattern):
                    self.note(key, kind, reason)
        for key in self.left():
            is_table = any(pattern.startswith(f"{key}.") for pattern, _, _ in reasons)
            if is_table and self.values[key] not in (None, "", {}):
                raise ConfigError(
                    f"{self.framework}: {key} = {self.values[key]!r} is of the wrong type; "
                    "it must be a table of keys"
                )

    def left(self) -> list[str]:
        """The keys that have not been read, in the order of the file."""
        return [key for key in self.values if key not in self.taken]

    def finish(self) -> None:
        """Name what is left as unknown."""
        for key in self.left():
            self.note(key, "unknown", f"plait knows no such key of {self.framework}")


def _flattened(table: JsonMapping, prefix: str = "") -> JsonObject:
    flat: JsonObject = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flattened(value, f"{path}."))
        else:
            flat[path] = value
    return flat
