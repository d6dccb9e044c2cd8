"""The size of a config's adapters beside its model, counted on the meta device.

The model is made by its own code, so that targets mean the layers that a run adapts. Everything
here loads torch, and only where a config has adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ModelError
from plait.values import JsonMapping


def adapter_share(tables: JsonMapping) -> float:
    """Numbers of a config's adapters over those of its model; 0 without adapters.

    Raises `ModelError` for targets that match nothing, and for a model that no code here makes.
    """
    table = tables.get("adapter") or {}
    model = tables.get("model")
    if not table.get("kind"):
        return 0.0
    if not isinstance(model, Mapping) or not ("name" in model or "python" in model):
        raise ModelError(
            "the size of adapters is counted on the model itself: give [model] name = ..., as in "
            'name = "hf" with config = ...'
        )
    base = _made(model)
    numbers = sum(param.numel() for param in base.parameters())
    from plait.models.adapters import AdapterSettings, adapt

    keys = {key: value for key, value in table.items() if key not in ("weights", "targets")}
    targets = table.get("targets")
    adapt(base, AdapterSettings(**keys, targets=tuple(targets) if targets else None))
    trained = sum(param.numel() for param in base.parameters() if param.requires_grad)
    return trained / numbers


def _made(model: JsonMapping) -> Any:
    import torch

    from plait.models import make, user

    keys = {key: value for key, value in model.items() if key not in ("roles", "weights")}
    with torch.device("meta"):
        if "python" in keys:
            return user.make(keys["python"], keys.get("arguments"))
        return make(keys.pop("name"), **keys)
