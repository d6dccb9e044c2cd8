"""The small files of a library's model that no weight is in: those of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "*processor_config.json",
)
"""Patterns of the files beside a model that its tokenizer or processor is made of."""


def tokenizer_files(folders: Sequence[Path]) -> list[Path]:
    """The files of the tokenizer in the first of these folders that has some.

    A path of a file stands for its folder.
    """
    for given in folders:
        folder = given if given.is_dir() else given.parent
        found = [path for pattern in TOKENIZER for path in sorted(folder.glob(pattern))]
        files = list(dict.fromkeys(path for path in found if path.is_file()))
        if files:
            return files
    return []
