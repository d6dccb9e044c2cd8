"""The answer of a verb: the data, a view of it for people, and whether the answer is yes. Also the
file that a verb writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.parser import UsageError
from plait.values import JsonObject, JsonValue

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = JsonObject
"""One object of `--json`, or a row of one."""


@dataclass(frozen=True)
class Answer:
    """`data` is the object of `--json`; `view` is what is printed otherwise; `ok` false means exit
    code 1.

    Without data nothing is printed: a rank of a world lets rank 0 speak. `serve` goes on after the
    answer is printed, until it is stopped or has an answer of its own. A `view` that needs more
    than plain text is a function, called where it is printed.
    """

    data: Json | None
    view: RenderableType | Callable[[], RenderableType] | None = None
    ok: bool = True
    serve: Callable[[], Answer | None] | None = None

    def shown(self) -> RenderableType | None:
        """The view itself."""
        return self.view() if callable(self.view) else self.view


def to_json(data: Json) -> str:
    """One line of standard JSON: NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(value: JsonValue) -> JsonValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def write_text(out: Path, text: str) -> None:
    """Write a file, and its folder. Raises `UsageError` where that cannot be."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
