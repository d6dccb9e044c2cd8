"""Faults of a config's tables where the schemas cannot be loaded, as in a browser's tab."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from plait.errors import nearest
from plait.values import JsonMapping

NUMBERS: Final = {"data": ("seq_len",), "train": ("global_batch",)}
"""Keys of sections that a prediction reads as whole numbers."""
SECTIONS: Final = ("model", *NUMBERS, "plan", "cluster")


def plain_faults(tables: JsonMapping) -> Iterator[str]:
    """A sentence for each fault."""
    for section, table in tables.items():
        if section not in SECTIONS:
            yield f"unknown section [{section}]; {nearest(str(section), SECTIONS)}"
        elif not isinstance(table, Mapping):
            yield f"[{section}] must be a table of keys, not {table!r}"
        elif section == "model":
            yield from _of_model(table)
        else:
            yield from _of_section(section, table)


def _of_model(table: JsonMapping) -> Iterator[str]:
    if "name" in table or "python" in table:
        yield (
            "a model of plait by its name is read by plait explore on your machine; here, paste a "
            "Hugging Face config.json"
        )
    elif "model_type" not in table:
        yield "model_type is missing, as a Hugging Face config.json has it"


def _of_section(section: str, table: JsonMapping) -> Iterator[str]:
    for key in NUMBERS.get(section, ()):
        value = table.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{section}.{key} must be a whole number from 1 on, not {value!r}"
