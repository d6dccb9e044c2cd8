"""`plait config`: every key of a config, as a table or as a JSON schema; a config to begin with."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from plait.cli.answer import Answer
from plait.values import JsonValue

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.config.schema import Key


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
    from rich.table import Table
    from rich.text import Text

    table = Table("section", box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for title in ("type", "default", "meaning"):
        table.add_column(title, overflow="fold")
    for key in keys:
        section = f"{key.section} ({key.model})" if key.model else key.section
        words = (section, key.key, key.type, _default_text(key), key.meaning)
        table.add_row(*(Text(word) for word in words))
    return table


def _default_text(key: Key) -> str:
    if key.required:
        return "required"
    default: JsonValue = key.default
    return "-" if default is None else json.dumps(default)
