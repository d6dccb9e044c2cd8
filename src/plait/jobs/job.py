"""The run that a script starts, and the text of a script."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from plait.errors import ConfigError
from plait.values import JsonObject, JsonValue

PORT: Final = 29500
"""The port of rank 0's store, unless another one is named."""
NAME_LENGTH: Final = 40


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class TrainJob:
    """One run of `plait train` on `nodes` machines with `ranks_per_node` ranks each.

    Attributes:
        out: the run's folder; None leaves it to the script.
        plan: the text of the plan; None leaves it to the config.
        gpus: whether a rank needs a GPU.
        deadline_seconds: the time to save after the signal that ends a job.
        image: the container image, where containers are used.
    """

    config: str
    out: str | None
    nodes: int
    ranks_per_node: int
    plan: str | None = None
    overrides: Sequence[str] = ()
    gpus: bool = True
    deadline_seconds: int = 60
    image: str = "YOUR_REGISTRY/plait:latest"
    hours: int = 24

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def shape(self, noun: str) -> str:
        """How many ranks there are and where, in words: `4 ranks: 2 nodes with 2 ranks each`."""
        ranks = counted(self.ranks_per_node, "rank")
        each = " each" if self.nodes > 1 else ""
        where = f"{counted(self.nodes, noun)} with {ranks}{each}"
        return f"{counted(self.world_size, 'rank')}: {where}"

    @property
    def name(self) -> str:
        """A name that every queue takes: small letters, digits and dashes."""
        stem = re.sub(r"\.[a-z]+$", "", self.config.replace("\\", "/").rsplit("/", 1)[-1].lower())
        words = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:NAME_LENGTH].strip("-")
        return f"plait-{words}" if words else "plait"

    @property
    def run_folder(self) -> str:
        """The run's folder, where any folder of a machine will do."""
        return self.out or f"runs/{Path(self.config).stem}"

    def run_folder_below(self, mount: str) -> str:
        """The run's folder, where only files below `mount` outlive a machine.

        Errors: `ConfigError` for a folder elsewhere.
        """
        folder = PurePosixPath(posixpath.normpath(self.out or f"{mount}/{self.name}"))
        if PurePosixPath(mount) not in folder.parents:
            raise ConfigError(
                f"the run's folder {self.out!r} would be lost with its machine, as only {mount} is "
                f"kept; name a folder below that, such as --run-folder {mount}/{self.name}"
            )
        return str(folder)

    def train_words(self, config: str | None = None, out: str | None = None) -> list[str]:
        """The words of `plait train`. `--resume auto` makes the job safe to be started again."""
        words = ["train", config or self.config, "--out", out or self.run_folder]
        words += ["--resume", "auto"]
        if self.plan is not None:
            words += ["--plan", self.plan]
        if self.overrides:
            words += ["--set", *self.overrides]
        return words

    def train_line(self, config: str | None = None, out: str | None = None) -> str:
        """`train_words` for a shell, quoted."""
        return " ".join(shlex.quote(word) for word in self.train_words(config, out))


@dataclass(frozen=True)
class JobScript:
    """The text of one script, and how it is handed in."""

    target: str
    text: str
    file: str
    """The usual name of the file."""
    submit: str
    """The command that hands it in."""
    world_size: int
    notes: list[str] = field(default_factory=list)
    """Things that only the user knows, which the script leaves open."""

    def as_dict(self) -> JsonObject:
        """The fields as plain data, for `--json`."""
        data = asdict(self)
        data["for"] = data.pop("target")
        return data


def yaml_text(value: JsonValue, indent: int = 0) -> str:
    """Plain data as YAML with comments kept out: mappings, lists, text, numbers.

    Text is quoted as JSON, which is YAML too; text of several lines is a literal block.
    """
    import json

    pad = "  " * indent
    if isinstance(value, Mapping):
        lines: list[str] = []
        for key, inner in value.items():
            lines.append(f"{pad}{key}:{_inner(inner, indent)}")
        return "\n".join(lines)
    if isinstance(value, list):
        lines = []
        for item in value:
            if isinstance(item, (Mapping, list)):
                block = yaml_text(item, indent + 1)
                lines.append(f"{pad}- {block.lstrip()}")
            elif isinstance(item, str) and "\n" in item:
                lines.append(f"{pad}- |\n{_block(item, indent + 1)}")
            else:
                lines.append(f"{pad}- {json.dumps(item)}")
        return "\n".join(lines)
    return f"{pad}{json.dumps(value)}"


def _inner(value: JsonValue, indent: int) -> str:
    import json

    if isinstance(value, (Mapping, list)) and value:
        return f"\n{yaml_text(value, indent + 1)}"
    if isinstance(value, (Mapping, list)):
        return " {}" if isinstance(value, Mapping) else " []"
    if isinstance(value, str) and "\n" in value:
        return f" |\n{_block(value, indent + 1)}"
    return f" {json.dumps(value)}"


def _block(text: str, indent: int) -> str:
    """The lines of a literal block."""
    pad = "  " * indent
    return "\n".join(f"{pad}{line}" if line else "" for line in text.rstrip("\n").split("\n"))
