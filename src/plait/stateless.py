"""Call a module with other tensors in the place of its own.

`torch.func.functional_call` names each tensor once and ties its other names by itself. A module
that has two names is then exchanged twice, and keeps the tensors of the call. Here each module is
exchanged once, under its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from plait.values import PyTree

if TYPE_CHECKING:
    from torch import Tensor, nn


def replaced(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`make` of each parameter and buffer [...], by the names of its modules. What several modules
    share is made once.
    """
    made: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                tensors[f"{name}.{key}" if name else key] = made[id(tensor)]
    return tensors


def call_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    """The module's output for `args`, where its parameters and buffers are `tensors` [...] as of
    `replaced`.
    """
    from torch.func import functional_call

    return functional_call(module, dict(tensors), tuple(args), dict(kwargs), tie_weights=False)
