"""The start of a model that can make its whole values, as a Hugging Face model of a config does.

One rank makes them and sends them to the others, tensor by tensor. So no other rank holds the
model, and all have equal values, whatever their processors draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.errors import ModelError, some_of
from plait.models.weights import MakeStart
from plait.random_state import drawn_alone


def make_start(make: MakeStart, seed: int) -> dict[str, Tensor]:
    """Whole parameters and buffers [...] by name, as plain PyTorch makes them on the CPU after
    `torch.manual_seed(seed)`.

    Raises:
        ModelError: parameters without values.
    """
    model = make_whole(make, seed)
    found = {name: param.detach() for name, param in model.named_parameters()}
    return found | dict(model.named_buffers(remove_duplicate=False))


def make_whole(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with its values, as plain PyTorch makes it on the CPU after
    `torch.manual_seed(seed)`.

    Raises `ModelError` for parameters without values: new memory is NaN until then.
    """
    with drawn_alone(seed), torch.device("cpu"):
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            model = make()
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    unwritten = [
        name for name, param in model.named_parameters() if not param.is_meta and _has_nan(param)
    ]
    if unwritten:
        raise ModelError(
            f"{type(model).__name__} leaves {some_of(unwritten)} without values: that memory is "
            "never written; "
            "initialise it where the model is made"
        )
    return model


def _has_nan(param: nn.Parameter) -> bool:
    return param.is_floating_point() and bool(param.detach().isnan().any())


def told_start(
    make: MakeStart, seed: int, axis: Axis, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """(name, value [...]) of every whole parameter and buffer, made by the first rank of the axis.
    Collective.
    """
    tensors = make_start(make, seed) if axis.rank == 0 else {}
    forms = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    for name, shape, dtype in axis.gather_objects(forms)[0]:
        value = torch.empty(shape, dtype=dtype, device=device)
        if name in tensors:
            value.copy_(tensors.pop(name))
        if axis.size > 1:
            axis.broadcast(value, 0).wait()
        yield name, value
