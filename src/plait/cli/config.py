"""`plait config`: every key of a config, as a table or as a JSON schema; a config to begin with."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from plait.cli.answer import Answer
from plait.cli.layout import GAP, wrapped
from plait.values import JsonValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from plait.config.schema import Key

HEAD: Final = ("section", "key", "type", "default", "meaning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait config`."""
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--list", action="store_true", help="every key: section, key, type, default, meaning"
    )
    wanted.add_argument(
        "--model",
        metavar="NAME",
        help="a config of a known model, such as llama3-8b or gpt2, to be saved and changed",
    )
    wanted.add_argument(
        "--schema", action="store_true", help="a JSON schema, for editors that check TOML"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The keys, the schema, or a config of a known model. Errors: `ConfigError`."""
    from rich.text import Text

    from plait.config import schema

    if arguments.model is not None:
        from plait.explore.known import starting_config

        text = starting_config(arguments.model)
        return Answer({"config": text}, Text(text.rstrip()))
    if arguments.schema:
        described = schema.json_schema()
        return Answer(described, Text(json.dumps(described, indent=2)))
    keys = schema.keys()
    return Answer({"keys": [key.as_dict() for key in keys]}, view(keys))


def view(keys: list[Key]) -> RenderableType:
    """A table for people: a row a key."""
    return KeyTable(keys)


@dataclass(frozen=True)
class KeyTable:
    """A table of keys: a line a key in a file, with its meaning below it on a narrow terminal."""

    keys: list[Key]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        head, body = self.lines(options.max_width if console.is_terminal else sys.maxsize)
        text = Text(no_wrap=True, overflow="ignore")
        text.append(head, style="bold")
        for line in body:
            text.append(f"\n{line}")
        yield text

    def lines(self, width: int) -> tuple[str, list[str]]:
        """The head, and the lines of all keys. No word is broken, whatever the width."""
        rows = [HEAD, *(_cells(key) for key in self.keys)]
        columns = list(zip(*(row[:-1] for row in rows), strict=True))
        widths = [max(map(len, column)) for column in columns]
        longest = max(len(row[-1]) for row in rows)
        if sum(widths) + len(GAP) * len(widths) + longest > width:
            head, *below = (f"{GAP.join(row[:-1])}\n    {row[-1]}" for row in rows)
            return head, [wrapped(text, width) for text in below]
        head, *lines = (_line(row, [*widths, 0]) for row in rows)
        return head, lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))


def _cells(key: Key) -> tuple[str, ...]:
    section = f"{key.section} ({key.model})" if key.model else key.section
    return section, key.key, key.type, _default_text(key), key.meaning


def _default_text(key: Key) -> str:
    if key.required:
        return "required"
    default: JsonValue = key.default
    return "-" if default is None else json.dumps(default)
