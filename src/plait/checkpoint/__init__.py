"""Checkpoints by slices: saved under any plan, loaded under any plan, without pickle.

Every rank writes what it holds as (name, global shape, box, flat range). Loading intersects what is
wanted with what was written. `folder` knows no torch, so the launcher can find a checkpoint before
any rank exists. Names that need torch are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from plait.checkpoint.folder import previous, resolve
from plait.mesh import Shard
from plait.mesh.boxes import Box, FlatRange, Rectangle

if TYPE_CHECKING:
    from plait.checkpoint.entry import RANDOM_PREFIX
    from plait.checkpoint.export import export_safetensors
    from plait.checkpoint.read import Checkpoint
    from plait.checkpoint.write import save

__all__ = [
    "RANDOM_PREFIX",
    "Box",
    "Checkpoint",
    "FlatRange",
    "Rectangle",
    "Shard",
    "export_safetensors",
    "previous",
    "resolve",
    "save",
]

_MODULES = {
    "RANDOM_PREFIX": "entry",
    "Checkpoint": "read",
    "export_safetensors": "export",
    "save": "write",
}


def __getattr__(name: str) -> object:
    """Import a name that needs torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'plait.checkpoint' has no attribute '{name}'")
    return getattr(importlib.import_module(f"plait.checkpoint.{_MODULES[name]}"), name)
