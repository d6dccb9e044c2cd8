"""The config of a run, as TOML: strict schemas, overrides, and every fault said at once. Imports no
torch.

Its names are loaded when they are first used, as a browser's tab has no schemas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.config.config import Config, load
    from plait.config.model import MODELS, ModelSection
    from plait.config.sections import ClusterSection, Data, Federated, PlanSection, Train

__all__ = [
    "MODELS",
    "ClusterSection",
    "Config",
    "Data",
    "Federated",
    "ModelSection",
    "PlanSection",
    "Train",
    "load",
]

_HOMES = {
    **dict.fromkeys(("Config", "load"), "config"),
    **dict.fromkeys(("MODELS", "ModelSection"), "model"),
    **dict.fromkeys(("ClusterSection", "Data", "Federated", "PlanSection", "Train"), "sections"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait.config' has no attribute {name!r}")
    return getattr(import_module(f"plait.config.{_HOMES[name]}"), name)
