"""`compile`: torch.compile of each repeated block, and of nothing around it.

A block is what repeats, so one graph serves all of them; what the engine hangs around a block (gathering its parameters,
recomputing it) stays outside of the graph. What happens *inside* a block must be a pure function of tensors: a block that
talks to other ranks, whose weight gradients are left for later, or that draws random numbers is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError, NotAvailable

COMPILERS = ("c++", "g++", "clang++")


def apply(model: nn.Module, blocks: Sequence[str], *, backend: str = "inductor", device: torch.device | None = None) -> None:
    """Compile the forward of each block. Raises ModelError or NotAvailable where that cannot be done rightly."""
    if not blocks:
        raise ModelError("compile works block by block, and this model names none; pass blocks='layers.*'")
    on_cpu = device is None or device.type == "cpu"
    if backend == "inductor" and on_cpu and not any(shutil.which(name) for name in COMPILERS):
        raise NotAvailable(f"compile on the CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here; leave it out")
    for name in blocks:
        block = model.get_submodule(name)
        for inner, module in block.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ModelError(
                    f"compile draws other random numbers than one device does, and '{name}.{inner}' drops out {module.p:g}; "
                    "set its rate to 0, or leave compile out"
                )
        forward: Any = torch.compile(block.forward, backend=backend)
        block.forward = forward
