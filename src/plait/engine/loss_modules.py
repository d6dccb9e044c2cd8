"""The modules of a loss that are not the model's, as DINO's loss with the centre of its outputs.

What a call changes in them is looked at as what a forward changes in the model. No checkpoint
holds it: a loop on one device saves `loss.state_dict()` by itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plait.engine.loss import LossFunction
from plait.engine.loss_reads import is_of_a_library
from plait.engine.norms_of_parameters import changed, norms_of
from plait.engine.unchanged import is_of_an_engine
from plait.errors import some_of
from plait.held import held_by

LOOKED_AT = 10_000
"""How many objects that a loss holds are looked at."""


class LossModules:
    """The modules that a loss is, is bound to or reads, without those that an engine trains."""

    def __init__(self, loss: LossFunction, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._originals = weakref.WeakSet(model.modules())
        self._roots = list(_modules_of(loss))
        self._tensors = self.buffers()
        self._versions = {name: one._version for name, one in self._tensors.items()}
        self._norms = norms_of(self._tensors)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules by their paths, which begin with "loss"."""
        if not self._roots:
            return
        model = self._model()
        seen = set(self._originals) | set(() if model is None else model.modules())
        for number, root in enumerate(self._roots):
            yield from _beside("loss" if not number else f"loss[{number}]", root, seen)

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers [...] by name, but those of norms."""
        return {
            f"{path}.{key}": buffer
            for path, module in self.named_modules()
            if not isinstance(module, _NormBase)
            for key, buffer in module._buffers.items()
            if buffer is not None
            and key not in module._non_persistent_buffers_set
            and buffer.layout is torch.strided
            and not buffer.is_inference()  # of which no version is counted
        }

    def warn_of_what_is_left_out(self) -> None:
        """Tell which buffers have changed since the build, and are in no checkpoint."""
        if not self._tensors:  # as most: a walk through all modules takes its time at each save
            return
        now = self.buffers()
        written = changed(self._norms, norms_of(now))
        names = [
            name
            for name, one in now.items()
            if one is not self._tensors.get(name)
            or one._version != self._versions[name]
            or name in written
        ]
        if names:
            warnings.warn(
                f"the loss has changed its buffers {some_of(map(repr, names))}, "
                "and checkpoints and recovery hold the model alone: a run that goes on begins them "
                "again; save and load loss.state_dict() beside engine.save, or make the module a "
                "part of the model, whose forward then calls it",
                stacklevel=2,
            )


def _beside(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it that were not seen, but what an engine trains."""
    unseen = [one for one in module.modules() if one not in seen]
    params = [param for one in unseen for param in one.parameters(recurse=False)]
    if module in seen or (params and all(map(is_of_an_engine, params))):
        return
    seen.add(module)
    yield path, module
    for name, child in module.named_children():
        yield from _beside(f"{path}.{name}", child, seen)


def _modules_of(loss: LossFunction) -> Iterator[nn.Module]:
    """The outermost modules that a loss reaches, the nearest first."""
    seen: set[int] = set()
    left = deque[object]([loss])
    while left and len(seen) < LOOKED_AT:
        one = left.popleft()
        if id(one) in seen or isinstance(one, (type, ModuleType, Tensor)):
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
        else:
            left.extend(islice(held_by(one), LOOKED_AT))
            left.extend(_globals_of(one))


def _globals_of(value: object) -> Iterator[object]:
    """The modules and functions of its file that a function names, unless a library has it."""
    if isinstance(value, FunctionType) and not is_of_a_library(value):
        for name in value.__code__.co_names:
            found = value.__globals__.get(name)
            if isinstance(found, (nn.Module, FunctionType)):
                yield found
