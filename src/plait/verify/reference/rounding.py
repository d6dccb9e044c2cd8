"""Bounds by perturbation: how far a right run may lie from the reference in its own precision.

The reference runs again and again. Its weights and inputs move by one unit in the last place. Its
products and sums are taken in another order, and the batch is cut in slices. In half of the runs
every result moves by one unit as well (see `lowered`). The furthest that a number then lies from
the reference, times `FACTOR`, is what passes. So an ill-conditioned number gets a wide bound, and a
well-conditioned one a narrow one, in float32 as in bf16 and float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.batch_trees import map_tensors
from plait.values import JsonObject, PyTree
from plait.verify.record.compare import EVERY_GRADIENT, Difference, Key, differences
from plait.verify.record.observation import Record
from plait.verify.reference.batches import Batch, num_samples, taken
from plait.verify.reference.copied import copied
from plait.verify.reference.lowered import LowPrecision
from plait.verify.reference.one_device import Slice
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.underflow import Place, Underflow, at_the_end

RUNS = 6
FACTOR = 4.0
PARTS = 3
NUMBERS = (
    "loss",
    "grad_norm",
    "update",
    "scale",
)  # one number a step, which may stay near by chance
FEWEST = 16  # elements of a tensor whose rounding goes up as often as down

Rerun = Callable[[Recipe, nn.Module, Sequence[Batch], bool], Record]
"""Trains a model on batches; the flag asks for slices of each batch, one after the other."""

aten = torch.ops.aten


class OtherSums(TorchDispatchMode):
    """Products and sums over a dim in `PARTS` parts of shuffled terms, each rounded by itself."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(  # as torch calls it
        self, func: Callable[..., PyTree], types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        kwargs = kwargs or {}
        if not kwargs and isinstance(args[0], Tensor) and args[0].is_floating_point():
            if func in (aten.mm.default, aten.bmm.default):
                return self._product(func, *args)
            if func is aten.addmm.default:
                return args[0] + self._product(aten.mm.default, *args[1:])
        if func is aten.sum.dim_IntList and not kwargs and args[1]:
            return self._sum(*args)
        return func(*args, **kwargs)

    def _product(self, func: Callable[..., PyTree], first: Tensor, second: Tensor) -> Tensor:
        parts = self._parts(first.shape[-1])
        products = [func(first[..., part], second[..., part, :]) for part in parts]
        return _added(products)

    def _sum(self, value: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        if not value.is_floating_point():
            return aten.sum.dim_IntList(value, dims, keepdim)
        parts = self._parts(value.shape[dims[0]])
        sums = [
            aten.sum.dim_IntList(value.index_select(dims[0], part), dims, keepdim) for part in parts
        ]
        return _added(sums)

    def _parts(self, count: int) -> Sequence[Tensor]:
        order = torch.randperm(count, generator=self._generator)
        return [part for part in order.tensor_split(PARTS) if len(part)] or [order]


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(frozen=True)
class RoundingBounds:
    """The largest error that passes, by number; `least` for those that never moved.

    `ways`: how far each element of a gradient [...] may move, in a precision below float32.
    """

    limits: Mapping[Key, float]
    least: float
    ways: Mapping[Place, Tensor] = field(default_factory=dict)

    @property
    def middle(self) -> float:
        """The bound of a gradient in the middle."""
        grads = sorted(limit for (_, kind, _), limit in self.limits.items() if kind == "grad")
        return grads[len(grads) // 2] if grads else self.least

    def further(self, errors: Mapping[Key, float]) -> RoundingBounds:
        """Bounds that let each number go further by its error."""
        wider = {key: self.limits.get(key, self.least) + error for key, error in errors.items()}
        return replace(self, limits={**self.limits, **wider})

    def asked(self) -> JsonObject:
        """The arguments for `judge`."""
        return {"limits": self.limits, "tolerance": self.least, "slack": self.middle}

    def limited(self, found: Iterable[Difference]) -> list[Difference]:
        """Differences with their limits."""
        return [replace(one, limit=self.limits.get(one.key)) for one in found]

    def note(self) -> str:
        """The sentence of a report about the bounds."""
        return (
            f"what passes is {FACTOR:g} times what the last place does to one device; half of the "
            f"gradients may differ by {self.middle:.1e} at most"
        )


def bounds(
    reference: Record,
    rerun: Rerun,
    recipe: Recipe,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    dtype: torch.dtype,
) -> RoundingBounds:
    """How far each number may be from the reference's, where the run computes in `dtype`."""
    underflow = Underflow(reference, dtype)

    def runs() -> Iterator[Record]:
        for seed in range(RUNS):
            generator = torch.Generator().manual_seed(seed)
            start = moved_model(model, generator)
            data = [moved(batch, generator) for batch in batches]
            with ExitStack() as stack:
                stack.enter_context(OtherSums(generator))
                if seed % 2:
                    stack.enter_context(LowPrecision(torch.float64, generator))
                again = rerun(_clipped(recipe, dtype, seed), start, data, seed >= RUNS // 2)
            underflow.add(again)
            yield again

    found = of_runs(reference, runs(), dtype)
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        found = replace(found, ways=underflow.ways(FACTOR))
    ways = underflow.jumps(recipe, FACTOR)
    ends = [at_the_end(recipe, ways, up) for up in (False, True)] if ways else []
    return found.further(furthest(reference, (rerun(one, model, batches, False) for one in ends)))


def of_runs(reference: Record, runs: Iterable[Record], dtype: torch.dtype) -> RoundingBounds:
    """The bounds from runs that were shaken."""
    least = torch.finfo(dtype).eps
    errors = _of_numbers(furthest(reference, runs), later=dtype != torch.float64)
    limits = {key: max(FACTOR * error, least) for key, error in errors.items() if error > 0}
    return RoundingBounds(limits, least)


def furthest(reference: Record, runs: Iterable[Record]) -> dict[Key, float]:
    """The largest error of each number over the runs."""
    found: dict[Key, float] = {}
    for again in runs:
        for one in (*differences(again, reference), *scales(again, reference)):
            found[one.key] = max(found.get(one.key, 0.0), one.error)
    return found


def scales(parallel: Record, reference: Record) -> Iterator[Difference]:
    """How far each gradient is from once the reference's, and all of them together.

    Rounding goes up and down, and a factor does not: it shows here far below a gradient's bound.
    """
    for step, (mine, truth) in enumerate(zip(parallel.steps, reference.steps, strict=True)):
        pairs = {
            name: (value, other)
            for name, other in truth.grads.items()
            if other is not None and bool(other.any())
            if (value := mine.grads.get(name)) is not None and value.shape == other.shape
        }
        total = [_joined(side) for side in zip(*pairs.values(), strict=True)]
        for name, (value, other) in pairs.items():
            if other.numel() >= FEWEST:
                yield Difference(step, "scale", name, scale_error(value.double(), other.double()))
        if total:
            yield Difference(step, "scale", EVERY_GRADIENT, scale_error(*total))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of the tensors, in float64, as one vector."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def scale_error(value: Tensor, truth: Tensor) -> float:
    """c - 1| for the c with which value [...] is nearest to c times truth."""
    energy = float(truth.square().sum())
    gap = abs(float((value.double() * truth).sum()) / energy - 1) if energy else 0.0
    return gap if math.isfinite(gap) else math.inf


def least_scale(value: Tensor, way: Tensor, dtype: torch.dtype) -> float:
    """The change in scale of a small `way` from `value`, both [...], when each element is rounded
    once.
    """
    ratio = float(value.double().norm()) / float(way.double().norm())
    return FACTOR * torch.finfo(dtype).eps * max(ratio, 1.0) / value.numel() ** 0.5


def _of_numbers(errors: Mapping[Key, float], later: bool) -> dict[Key, float]:
    """Each number of a step gets the largest error of its kind, up to this step.

    With `later` those of later steps count too: in a low precision one step in six runs says
    little.
    """
    wider = dict(errors)
    for step, kind, name in errors:
        if kind in NUMBERS:
            wider[step, kind, name] = max(
                error
                for (other, its_kind, its_name), error in errors.items()
                if (its_kind, its_name) == (kind, name) and (later or other <= step)
            )
    return wider


def _clipped(recipe: Recipe, dtype: torch.dtype, seed: int) -> Recipe:
    """A norm and its quotient are each rounded once: clipping scales all gradients by as much."""
    if recipe.clip_grad_norm is None:
        return recipe
    up = 2 * torch.finfo(dtype).eps * (1 if seed % 2 else -1)
    return replace(recipe, clip_grad_norm=recipe.clip_grad_norm * (1 + up))


def moved_model(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy whose weights lie one unit in the last place up, down or not at all."""
    moved = copied(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                parameter.copy_(_moved(parameter, generator))
    return moved


def moved(batch: PyTree, generator: torch.Generator) -> PyTree:
    """A batch whose floating inputs and targets have moved as well."""
    return map_tensors(lambda leaf: _moved(leaf, generator), batch)


def _moved(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
    return value.detach() * (1 + torch.finfo(value.dtype).eps * steps)


def halves(step: int, batch: Batch) -> list[Slice]:
    """A batch in two slices."""
    samples = num_samples(batch)
    parts = (range(samples // 2), range(samples // 2, samples))
    return [Slice(0, number, taken(batch, rows)) for number, rows in enumerate(parts)]
