"""The table of imported configs: files and keys of each framework, mapped, named or lost.

    python -m benchmarks.imports [--examples FRAMEWORK=FOLDER ...]

Files of our own hold every key of one version of a framework, each key alone and all together.
`--examples` adds the example configs of a folder, such as a checkout of the framework. A key is
lost when it is neither named nor able to change the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.interop import Imported, files, import_file, import_text, megatron
from plait.interop.source import Source

KEYS = Path(__file__).parent / "keys"
ENDINGS = {
    "deepspeed": (".json",),
    "megatron-lm": (".sh", ".yaml"),
    "torchtitan": (".toml",),
    "accelerate": (".yaml", ".yml"),
    "axolotl": (".yaml", ".yml"),
    "nanotron": (".yaml", ".yml"),
}


@dataclass
class Row:
    """Counts of one group of files. `refused` are files without a key of the framework."""

    framework: str
    group: str
    files: int = 0
    refused: int = 0
    keys: int = 0
    mapped: int = 0
    named: int = 0
    unknown: int = 0

    @property
    def lost(self) -> int:
        """Keys about which nothing was said."""
        return self.keys - self.mapped - self.named

    def add(self, keys: Iterable[str], imported: Imported) -> None:
        """Count the keys of a file."""
        keys = set(keys)
        named = {item.key for item in imported.unmapped}
        unknown = {item.key for item in imported.unmapped if item.kind == "unknown"}
        self.files += 1
        self.keys += len(keys)
        self.named += len(keys & named)
        self.mapped += len((keys - named) & set(imported.mapped))
        self.unknown += len(keys & unknown)


def known(framework: str) -> tuple[str, dict[str, Any]]:
    """The version of a framework that was read, and each of its keys with a value."""
    facts = json.loads((KEYS / f"{framework}.json").read_text())
    return facts["version"], facts["keys"]


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """A table of tables from dotted keys."""
    table: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return table


def import_values(framework: str, values: dict[str, Any]) -> tuple[set[str], Imported]:
    """The keys of a file of our own with these values, and what becomes of it."""
    if framework == "megatron-lm":
        words = [
            f"--{key}" if value is True else f"--{key} {value}" for key, value in values.items()
        ]
        return set(values), import_text(" ".join(words), "shell", framework)
    text = json.dumps(nested(values))
    return set(Source.of("", json.loads(text)).values), import_text(text, "json", framework)


def own_rows() -> Iterator[Row]:
    """Every key alone, then all together, for each framework."""
    for framework in ENDINGS:
        version, values = known(framework)
        alone = Row(framework, f"each key of {version} alone")
        for key, value in values.items():
            alone.add(*import_values(framework, {key: value}))
        yield alone
        together = Row(framework, f"all keys of {version} together")
        together.add(*import_values(framework, values))
        yield together


def keys_of(path: Path, framework: str) -> set[str]:
    """The keys of a file, found without the importer of its framework."""
    text = files.read_text(path)
    table = files.parse(text, files.form_of(path, text))
    if framework == "megatron-lm":
        table = megatron.options_of(table)
    return set(Source.of("", table).values)


def example_row(framework: str, folder: Path) -> Row:
    """The example configs of a folder."""
    row = Row(framework, "examples")
    for path in sorted(folder.rglob("*")):
        if path.suffix not in ENDINGS[framework] or not path.is_file():
            continue
        try:
            imported = import_file(path, framework)
        except ConfigError as error:
            row.refused += 1
            print(f"refused: {error}", file=sys.stderr)
            continue
        row.add(keys_of(path, framework), imported)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", nargs="*", default=[], metavar="FRAMEWORK=FOLDER")
    arguments = parser.parse_args()
    rows = list(own_rows())
    for told in arguments.examples:
        framework, _, folder = told.partition("=")
        rows.append(example_row(framework, Path(folder)))
    print("| framework | files | refused | keys | mapped | named | of these unknown | lost |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row.framework}: {row.group}", row.files, row.refused, row.keys, row.mapped]
        cells += [row.named, row.unknown, row.lost]
        print(f"| {' | '.join(str(cell) for cell in cells)} |")


if __name__ == "__main__":
    main()
