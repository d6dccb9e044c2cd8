"""The description of a model that a config makes by code. It is made on the meta device, and run
there on a sample of its data.

That is a user's own function (`python = "module:function"`), and what plait has no formulae for.
Everything here loads torch, and only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.predict.cost.model.modules import SAMPLES, describe_by_running
from plait.predict.cost.model.operations import Model
from plait.values import JsonMapping

BY_RUNNING = frozenset({"fno"})
"""Models of plait's own that have no formulae here."""


def is_made(model: Mapping[str, object]) -> bool:
    """Whether a `[model]` table names code rather than sizes."""
    return bool(model.get("python")) or model.get("name") in BY_RUNNING


def describe_made(model: JsonMapping, data: JsonMapping, seq_len: int) -> Model:
    """The description of the model that a `[model]` table makes, of samples as its `[data]` table
    gives them.

    Raises `ModelError` for a function that fails or a model that cannot run on the meta device.
    """
    import torch

    from plait.models import make, user

    keys = {key: value for key, value in model.items() if key not in ("roles", "arguments")}
    with torch.device("meta"):
        by_name = "python" not in keys
        made = (
            make(keys.pop("name"), **keys)
            if by_name
            else user.make(keys["python"], model.get("arguments"))
        )
    return describe_by_running(made, seq_len or 1, model.get("roles"), example=_sample(data, model))


def _sample(data: JsonMapping, model: JsonMapping) -> Any:
    """The inputs of the first sample, as a batch of `SAMPLES` on the meta device. None where there
    are no data.
    """
    import torch

    from plait.datasets import make

    try:
        inputs = make(data, model)[0][0]
    except (PlaitError, LookupError):
        return None
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda leaf: torch.empty((SAMPLES, *leaf.shape), dtype=leaf.dtype, device="meta"),
        inputs,
    )
