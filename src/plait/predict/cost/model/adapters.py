"""The size of a config's adapters beside its model, counted on the meta device.

The model is made by its own code, so that targets mean the layers that a run adapts. Everything
here loads torch, and only where a config has adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import ModelError
from plait.values import JsonMapping


@dataclass(frozen=True)
class AdapterShare:
    """The adapters of a config beside its model.

    `trained`: their numbers over those of the model, and 0 without adapters. `trained_dense` and
    `trained_experts` are those beside dense layers and beside experts, over the numbers of these.
    `coded`: the part of
    the model's numbers that is kept in codes. `coded_bytes`: of such a number, with its part of a
    scale.
    """

    trained: float = 0.0
    trained_dense: float = 0.0
    trained_experts: float = 0.0
    coded: float = 0.0
    coded_bytes: float = 0.0


def adapter_share(tables: JsonMapping) -> AdapterShare:
    """The adapters of a config beside its model; without adapters all are 0.

    Raises `ModelError` for targets that match nothing, and for a model that no code here makes.
    """
    table = tables.get("adapter") or {}
    model = tables.get("model")
    if not table.get("kind"):
        return AdapterShare()
    if not isinstance(model, Mapping) or not ("name" in model or "python" in model):
        raise ModelError(
            "the size of adapters is counted on the model itself: give [model] name = ..., as in "
            'name = "hf" with config = ...'
        )
    base = _made(model)
    numbers = sum(param.numel() for param in base.parameters())
    from plait.models.adapter_parts import AdapterSettings
    from plait.models.adapters import adapt, coded_weights
    from plait.models.coded import bytes_of_number

    keys = {key: value for key, value in table.items() if key not in ("weights", "targets")}
    targets = table.get("targets")
    adapt(base, AdapterSettings(**keys, targets=tuple(targets) if targets else None))
    trained = sum(param.numel() for param in base.parameters() if param.requires_grad)
    formats = coded_weights(base)
    coded = sum(base.get_parameter(name).numel() for name in formats)
    width = bytes_of_number(min(formats.values())) if formats else 0.0
    experts, of_experts = _of_experts(base)
    return AdapterShare(
        trained / numbers,
        (trained - of_experts) / (numbers - experts),
        of_experts / experts if experts else 0.0,
        coded / numbers,
        width,
    )


def _of_experts(model: Any) -> tuple[int, int]:
    """The numbers of a model's packed experts, and of their adapters."""
    from plait.models.adapter_parts import parts_of
    from plait.models.expert_adapters import matrices_of

    experts = adapters = 0
    for module in model.modules():
        if matrices_of(module):
            experts += sum(param.numel() for param in module.parameters(recurse=False))
            parts = [part.get_parameter("weight") for _, part in parts_of(module)]
            adapters += sum(matrix.numel() for matrix in parts)
    return experts, adapters


def _made(model: JsonMapping) -> Any:
    import torch

    from plait.models import make, user

    keys = {key: value for key, value in model.items() if key not in ("roles", "weights")}
    with torch.device("meta"):
        if "python" in keys:
            return user.make(keys["python"], keys.get("arguments"))
        return make(keys.pop("name"), **keys)
