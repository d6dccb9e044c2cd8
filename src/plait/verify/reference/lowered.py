"""Effects of parts in less than the run's precision, on every number that they reach.

A loss that says `.float()` in a run in float64 rounds to float32, and a plan rounds in other places
than one device. So one device is run again. Each such result is moved by one unit in its last
place, up, down or not (J. Vignes, A stochastic arithmetic for reliable scientific computation,
1993, section 4). A number that moves may differ as far. One that does not move is independent of
the part, and keeps the run's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.torch_internals import in_backward
from plait.values import PyTree
from plait.verify.record.compare import TOLERANCE, UPDATE_FACTOR, Key, differences
from plait.verify.record.observation import Record

RUNS = 3
# A sum of many numbers is rounded more often than once, and in another order under another plan.
FACTOR = 16.0


class LowPrecision(TorchDispatchMode):
    """Watches for floating results with fewer bytes than `dtype`, made from what is trained.

    `found` are their dtypes. With a `generator`, each such result is moved by one unit in its last
    place, or not.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()
        self._bytes = dtype.itemsize
        self._generator = generator

    def __torch_dispatch__(  # as torch calls it
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        result = func(*args, **(kwargs or {}))
        if _is_view(func) or not any(_is_trained(leaf) for leaf in tree_leaves((args, kwargs))):
            return result
        for value in _floating(result):
            if value.dtype.itemsize < self._bytes:
                self.found.add(value.dtype)
                if self._generator is not None:
                    self._move(value)
        return result

    def _move(self, value: Tensor) -> None:
        steps = torch.randint(-1, 2, value.shape, generator=self._generator)
        value.mul_(1 + torch.finfo(value.dtype).eps * steps.to(value))


def bounds(
    reference: Record,
    rerun: Callable[[], Record],
    dtype: torch.dtype,
    *,
    most: float | None = None,
) -> dict[Key, float]:
    """How far each number may be from the reference's, where parts compute in less than `dtype`.

    `rerun` trains the reference once more. Empty where every operation keeps to `dtype`. No bound
    is above `most`, by default the tolerance of the coarsest precision that was seen.
    """
    furthest: dict[Key, float] = {}
    dtypes: set[torch.dtype] = set()
    for seed in range(RUNS):
        watch = LowPrecision(dtype, torch.Generator().manual_seed(seed))
        with watch:
            moved = rerun()
        dtypes |= watch.found
        if not dtypes:
            return {}
        for one in differences(moved, reference):
            furthest[one.key] = max(furthest.get(one.key, 0.0), one.error)
    coarsest = max(TOLERANCE.get(one, TOLERANCE[torch.float16]) for one in dtypes)
    limits = {
        key: min(FACTOR * error, most or coarsest) for key, error in furthest.items() if error > 0
    }
    for key, limit in limits.items():
        if key[1] == "update":
            limits[key] = max(limit, UPDATE_FACTOR * TOLERANCE[dtype])
    return _of_numbers(limits, dtypes)


def _of_numbers(limits: Mapping[Key, float], found: set[torch.dtype]) -> dict[Key, float]:
    """A single number may stay where it was by chance; so each gets the largest bound of its kind.

    None is below one unit in the last place of the precision in which it was computed.
    """
    least = max(torch.finfo(dtype).eps for dtype in found)
    largest: dict[str, float] = {}
    for (_, kind, _), limit in limits.items():
        largest[kind] = max(largest.get(kind, least), limit)
    return {
        key: largest[key[1]] if key[1] in ("loss", "grad_norm") else max(limit, least)
        for key, limit in limits.items()
    }


def note(limits: Mapping[Key, float]) -> str:
    """The sentence of a report about the bounds."""
    return (
        "parts of the model or its loss compute in a lower precision: the numbers that they reach "
        f"may differ by what its last place does to them, at most {max(limits.values()):.1e}"
    )


def _is_view(func: OpOverload) -> bool:
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_trained(leaf: PyTree) -> bool:
    """Whether a tensor depends on parameters: in a backward everything does."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return False
    return leaf.requires_grad or in_backward()


def _floating(tree: PyTree) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
