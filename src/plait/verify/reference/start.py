"""The start that a proof expects: what plain PyTorch gives a model, with nothing of the engine.

A model of the user's own is made by the user's function, a Hugging Face model by its library. Each
is made right after `torch.manual_seed`. What has no such code is started by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.engine.state.init import Initializer, place_holders
from plait.models import user
from plait.models.weights import start_of
from plait.values import JsonMapping


def plain_start(keys: JsonMapping, seed: int, model: nn.Module) -> nn.Module | None:
    """The model of a `[model]` section, in torch's default precision.

    `model` is the one that the engine is given. None where plain PyTorch has no start of its own:
    models of this project, weights from files, and modules with `INITIALISE_BY_NAME = True`.
    """
    python = keys.get("python")
    make = start_of(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if python is not None and not user.initialises_by_name(python):
            return user.make(python, keys.get("arguments"))
        return None if python is not None or make is None else make()


def start_by_name(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Give a meta model its values on the host: each module from the seed of its name."""
    host = torch.device("cpu")
    place_holders(model, dtype, host)

    def take(parameter: nn.Parameter, value: Tensor) -> None:
        parameter.data = value.clone()

    Initializer(model, seed, dtype, host).run(take)
