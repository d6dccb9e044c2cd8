"""A warning where a forward reads what the forward of another micro-batch has left in the model.

The hidden state of a language model, a memory of keys and a codebook of moving means are such
tensors. One device has one forward of all samples in a step. Sums that are only added to are the
same for any micro-batches. Batch norms move by custom, and spectral norms are told elsewhere.

The first step tells which tensors each forward changes. Only where there are any does the second
one look at what its forwards read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plait.engine.loss_modules import LossModules
from plait.engine.norms_of_parameters import changed, norms_of
from plait.errors import some_of

WRITES: Final = (
    *("copy_", "zero_", "fill_", "add_", "__iadd__", "index_add_", "scatter_add_", "index_copy_"),
)
"""Names of functions that only write into their first tensor, or add to it in place."""

SUMS: Final = ("add", "__add__", "__radd__")
"""Names of functions whose result may be the next sum."""

Tensors = dict[str, Tensor]


class _Reads(TorchFunctionMode):
    """Notes which of some tensors [...] functions read, by name, and which sums they give."""

    def __init__(self, watched: Tensors) -> None:
        super().__init__()
        self._watched = {id(tensor): (name, tensor) for name, tensor in watched.items()}
        self._read: set[str] = set()
        self._sums: list[tuple[str, Tensor]] = []

    def names(self, after: Tensors) -> set[str]:
        """The names of those that were read for more than a sum, which is now in their place."""
        return self._read | {name for name, total in self._sums if after.get(name) is not total}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note what it reads. A look at a size reads no numbers."""
        result = function(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        name = getattr(function, "__name__", "")
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args[1:] if name in WRITES else args, kwargs)):
                if id(leaf) in self._watched:
                    self._note(self._watched[id(leaf)][0], name, result)
        return result

    def _note(self, name: str, function: str, result: Any) -> None:
        if function in SUMS:
            self._sums.append((name, result))
        else:
            self._read.add(name)


class CarriedTensors:
    """Looks at the tensors in attributes and buffers around the forwards of two steps."""

    def __init__(self, model: nn.Module, loss_modules: LossModules) -> None:
        self._model = model
        self._loss_modules = loss_modules
        self._steps = 0
        self._forwards = 0
        self._changes: Counter[str] = Counter()
        self._found: set[str] = set()

    def during(self, forward: Callable[[], None]) -> None:
        """Do the forward of a micro-batch, and note what it changes and has read."""
        self._forwards += 1
        if self._steps and not self._changes:
            forward()
            return
        before = dict(self._tensors())
        versions = {name: one._version for name, one in before.items()}
        norms = norms_of(before)
        looks = self._steps and self._forwards > 1
        watched = {name: one for name, one in before.items() if name in self._changes}
        with _Reads(watched) if looks else nullcontext() as reads:
            forward()
        after = dict(self._tensors())
        written = changed(norms, norms_of({name: after[name] for name in before.keys() & after}))
        found = {
            name
            for name, one in after.items()
            if one is not before.get(name) or one._version != versions[name] or name in written
        }
        if not self._steps:
            self._changes.update(found)
        elif reads is not None:
            self._found |= found & reads.names(after)

    def end(self, plan: str) -> bool:
        """End a step, and warn of what was found. Returns whether that was the last one."""
        num, self._forwards = self._forwards, 0
        self._steps += 1
        if self._steps == 1:
            often = [name for name, times in self._changes.items() if times > 1]
            self._changes = Counter(often)
            return not often
        if self._found:
            _warn(sorted({name.partition("[")[0] for name in self._found}), plan, num)
        return True

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors [...] of several numbers in attributes and buffers, by the paths of these."""
        modules = chain(self._model.named_modules(), self._loss_modules.named_modules())
        for path, module in modules:
            if isinstance(module, _NormBase) or _iterates(module):
                continue
            for table in (vars(module), module._buffers):
                for key, value in table.items():
                    if key.startswith("_") and table is not module._buffers:
                        continue
                    name = f"{path}.{key}".lstrip(".")
                    for number, leaf in enumerate(_leaves(value)):
                        yield f"{name}[{number}]", leaf


def _warn(names: list[str], plan: str, num: int) -> None:
    warnings.warn(
        f"the forward carries {some_of(map(repr, names))} from one micro-batch to the next, which "
        f"has other samples, and the plan '{plan}' runs it {num} times in a step; one device runs "
        "it once with all samples, so that numbers differ; take mb out of a plan without pp, write "
        "mb1 with a pp of one stage a rank, or pass what belongs to a sample in the batch",
        stacklevel=2,
    )


def _leaves(value: object) -> list[Tensor]:
    """The plain tensors of several numbers that a value is or holds."""
    try:
        leaves = tree_leaves(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
    except RecursionError:  # a list that holds itself, as the links of a tree
        return []
    return [
        leaf
        for leaf in leaves
        if type(leaf) is Tensor
        and leaf.numel() > 1
        and leaf.layout is torch.strided
        and not leaf.is_meta
        and not leaf.is_inference()  # of which no version is counted
        and leaf.untyped_storage().nbytes()  # a view of a parameter may outlive its numbers
    ]


def _iterates(module: nn.Module) -> bool:
    """Whether a module has a spectral norm, or is one."""
    kinds = [type(one) for one in (module, *module._forward_pre_hooks.values())]
    return any(kind.__name__.endswith("SpectralNorm") for kind in kinds)
