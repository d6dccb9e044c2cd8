"""One token a save, in the index and in every file: files of two saves cannot pass for one.

    token = <random> - <digest of the meta data, the tensors, and the pieces of every file>

The random part tells saves apart. The digest ties the index to the files, so that an edited index
no longer fits them. Checkpoints from before the token have none in any of their files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from plait.values import JsonMapping

KEY = "save"
_TOKEN = r"[0-9a-f]{12}-[0-9a-f]{16}"
_HEAD = re.compile(rf'\{{"__metadata__":\{{"{KEY}":"({_TOKEN})"'.encode())
_HEAD_BYTES = 128


def make_token(random: str, meta: JsonMapping, tensors: JsonMapping, pieces: Sequence[str]) -> str:
    """The token of a save; `pieces` are the digests of what each file holds, in their order."""
    return token_of(random, meta, sorted_text(tensors), pieces)


def token_of(random: str, meta: JsonMapping, tensors: str, pieces: Sequence[str]) -> str:
    """`make_token`, given the `sorted_text` of the tensors."""
    text = f"[{sorted_text(meta)}, {tensors}, {json.dumps(list(pieces))}]"
    return f"{random}-{digest(text)}"


def sorted_text(values: JsonMapping) -> str:
    """The text of an object, with its keys in order."""
    return json.dumps(values, sort_keys=True)


def digest(text: str) -> str:
    """A digest of 16 characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fits(index: JsonMapping) -> bool:
    """Whether an index is the one that its token was made of; one without a token always is."""
    token = index.get(KEY)
    if token is None:
        return True
    if not isinstance(token, str) or not re.fullmatch(_TOKEN, token):
        return False
    pieces = [str(file.get("pieces")) for file in index["files"]]
    return token == make_token(token.partition("-")[0], index["meta"], index["tensors"], pieces)


def token_in(path: Path) -> str | None:
    """The token at the head of a file; None where there is none, or no file."""
    try:
        with path.open("rb") as file:
            match = _HEAD.match(file.read(_HEAD_BYTES)[8:])
    except OSError:
        return None
    return match[1].decode() if match else None


def lacks_token(path: Path) -> bool:
    """Whether the header of a file can be read and holds no token, as before there were tokens."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                return False
            metadata = json.loads(file.read(size))["__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    return isinstance(metadata, dict) and metadata.keys() == {"format", "pieces"}
