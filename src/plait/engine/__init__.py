"""Compose: from a model and a plan to an engine that trains. `build.build` is the visible order
(`plait.build` to users).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.engine.build import Options as Options
    from plait.engine.engine import Engine as Engine
    from plait.engine.step import StepResult as StepResult

_HOMES = {"Engine": "engine", "Options": "build", "StepResult": "step"}
__all__ = ["Engine", "Options", "StepResult"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait.engine' has no attribute {name!r}")
    return getattr(import_module(f"plait.engine.{_HOMES[name]}"), name)
