"""What is written for one family of the library: its name as a text in plait's source, counted.

A family is known by its `model_type`. Docstrings do not count, nor the names of models that plait
has itself. The aim is none where models are split and trained.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

import plait
from plait.config.model import MODELS
from plait.models import hf

ROOMS = {
    "split and trained": ("models", "parallel", "engine", "outer", "comm", "mesh", "run"),
    "read and written as files": ("checkpoint", "config", "interop", "cli"),
    "priced without torch": ("predict", "explore"),
}
OTHER_MEANINGS = ("clip",)
"""Names of families that are words of this project too."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines() -> list[str]:
    """A line for each group of rooms: how many places name a family, and which families."""
    auto: Any = hf.library().models.auto.configuration_auto
    families = set(auto.CONFIG_MAPPING_NAMES) - set(MODELS) - set(OTHER_MEANINGS)
    answer = []
    for what, rooms in ROOMS.items():
        places = [place for room in rooms for place in _places(room, families)]
        by_family: dict[str, list[str]] = defaultdict(list)
        for place, family in places:
            by_family[family].append(place)
        shown = "; ".join(f"{name}: {', '.join(at)}" for name, at in sorted(by_family.items()))
        detail = shown if len(by_family) <= 3 else f"{len(by_family)} families"
        answer.append(f"families named where models are {what}: {len(places)} ({detail or 'none'})")
    return answer


def _places(room: str, families: set[str]) -> list[tuple[str, str]]:
    """(file:line, family) of each text in a room that is a family's name."""
    package = Path(plait.__file__).parent
    found = []
    for path in sorted((package / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        documents = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
        }
        found += [
            (f"{path.relative_to(package)}:{node.lineno}", node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in documents
            if isinstance(node.value, str) and node.value in families
        ]
    return found
