"""Numbers for "the same": how far one run is from another, and whether the question was a real one.

Relative error of a tensor: max |a - b| / max(max |b|, 1e-4 times the largest |b| of that kind in
the model). The second term is for a gradient that is zero in exact arithmetic (the bias of
attention keys). It is not judged by its rounding noise. For the same reason a parameter's error is
never relative to less than the largest update of the step. A comparison of nothing with nothing
passes every tolerance, so `refusals` comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.verify.record.observation import (
    Gradients,
    Observation,
    Record,
    Tensors,
    non_finite,
    same_memory,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# an update is a small difference of large numbers: it is judged at this multiple of the tolerance
UPDATE_FACTOR = 100
FLOOR = 1e-4
EVERY_GRADIENT = "all gradients"
EVERY_PARAMETER = "all parameters"

Key = tuple[int, str, str]


@dataclass(frozen=True)
class Difference:
    """One comparison. `kind`: start, loss, count, grad, grad_norm, scale, param, update, buffer
    or replica; `rank` None: the agreed value. `limit`: the largest error that passes; None for the
    report's.
    """

    step: int
    kind: str
    name: str
    error: float
    rank: int | None = None
    limit: float | None = None

    @property
    def key(self) -> Key:
        """The identity of a comparison: step, kind and name."""
        return self.step, self.kind, self.name


def tolerance_of(record: Record) -> float:
    """The tolerance of the coarsest floating dtype among the parameters."""
    dtypes = {value.dtype for value in record.steps[0].params.values()} if record.steps else set()
    return max((TOLERANCE.get(dtype, 1e-4) for dtype in dtypes), default=TOLERANCE[torch.float64])


def peak(value: Tensor) -> float:
    """The largest absolute element of a tensor [...] that has some; NaN where one is."""
    if value.is_floating_point():
        return float(torch.linalg.vector_norm(value, ord=math.inf))
    return float(value.abs().max())


def largest(tensors: Mapping[str, Tensor | None]) -> float:
    """The largest absolute element over all tensors of any shape; 0 when there is none."""
    return max(
        (peak(value) for value in tensors.values() if value is not None and value.numel()),
        default=0.0,
    )


def relative_error(value: Tensor | None, truth: Tensor | None, scale: float = 0.0) -> float:
    """max |a - b| / max(max |b|, FLOOR * scale) of tensors [...]. None counts as zeros, another
    shape or a NaN as infinitely far.
    """
    if value is None and truth is None:
        return 0.0
    if value is None or truth is None:
        present = value if truth is None else truth
        assert present is not None
        value, truth = (
            torch.zeros_like(present) if side is None else side for side in (value, truth)
        )
    if value.shape != truth.shape:
        return math.inf
    if truth.numel() == 0:
        return 0.0
    gap = peak(_wide(value) - _wide(truth))
    if gap == 0.0:
        return 0.0
    size = max(peak(truth), FLOOR * scale)
    error = gap / size if size > 0 else math.inf
    return error if math.isfinite(error) else math.inf


def _wide(value: Tensor) -> Tensor:
    """The numbers in float64; complex ones as pairs."""
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def relative_number(value: float | None, truth: float | None) -> float:
    """The relative error of two numbers; one that a side does not know is not compared."""
    if value is None or truth is None:
        return 0.0
    if not (math.isfinite(value) and math.isfinite(truth)):
        return math.inf
    return 0.0 if value == truth else abs(value - truth) / max(abs(truth), 1e-300)


def update_error(value: Tensors, truth: Tensors, before: Tensors) -> float:
    """|a - b| / |b - before| over all parameters (2-norms): it shows a wrong step size that large
    weights would hide.
    """
    gap = moved = 0.0
    for name in truth.keys() & value.keys() & before.keys():
        if value[name].shape == truth[name].shape == before[name].shape:
            gap += float((value[name].double() - truth[name].double()).square().sum())
            moved += float((truth[name].double() - before[name].double()).square().sum())
    return 0.0 if gap == 0 else math.sqrt(gap / moved) if moved > 0 else math.inf


def differences(parallel: Record, reference: Record) -> Iterator[Difference]:
    """Every comparison of the two runs, in order of steps; names that only one side has are
    infinitely far.
    """
    if parallel.start is not None and reference.start is not None:
        for name, error in _named(parallel.start, reference.start):
            yield Difference(0, "start", name, error)
    for step, (step_here, truth) in enumerate(zip(parallel.steps, reference.steps, strict=True)):
        yield Difference(step, "loss", "loss", relative_number(step_here.loss, truth.loss))
        yield Difference(
            step, "count", "tokens or samples", relative_number(step_here.count, truth.count)
        )
        yield Difference(
            step, "grad_norm", "grad_norm", relative_number(step_here.grad_norm, truth.grad_norm)
        )
        before = reference.before(step)
        for name, error in _named(step_here.grads, truth.grads):
            yield Difference(step, "grad", name, error)
        for name, error in _named(
            step_here.params, truth.params, _largest_update(truth.params, before)
        ):
            yield Difference(step, "param", name, error)
        if step_here.buffers:
            known = {
                name: truth.buffers[name] for name in step_here.buffers if name in truth.buffers
            }
            for name, error in _named(step_here.buffers, known):
                yield Difference(step, "buffer", name, error)
        if before is not None:
            yield Difference(
                step,
                "update",
                EVERY_PARAMETER,
                update_error(step_here.params, truth.params, before),
            )
        yield from _copies(step, step_here, truth)


def _largest_update(after: Tensors, before: Tensors | None) -> float:
    if before is None:
        return 0.0
    return largest({name: after[name] - before[name] for name in after if name in before})


def _named(mine: Gradients, truth: Gradients, least: float = 0.0) -> Iterator[tuple[str, float]]:
    """The errors by name; none is relative to less than `least`."""
    scale = max(largest(truth), least / FLOOR)
    for name in sorted(truth.keys() | mine.keys()):
        if name not in mine or name not in truth:
            present = mine.get(name, truth.get(name))
            nothing = present is None or not present.numel()  # frozen, or without elements
            yield name, 0.0 if nothing else math.inf
        else:
            yield name, relative_error(mine[name], truth[name], scale)


def _copies(step: int, mine: Observation, truth: Observation) -> Iterator[Difference]:
    """Each rank's own copies: gradients against the truth, parameters against the agreed value of
    the same run (replicas).
    """
    grad_scale = largest(truth.grads)
    param_scale = largest(truth.params)
    for rank, view in sorted(mine.ranks.items()):
        for name, grad in view.grads.items():
            if grad is not None and name in truth.grads:
                yield Difference(
                    step, "grad", name, relative_error(grad, truth.grads[name], grad_scale), rank
                )
        for name, value in view.params.items():
            if name in mine.params and value is not mine.params[name]:
                yield Difference(
                    step,
                    "replica",
                    name,
                    relative_error(value, mine.params[name], param_scale),
                    rank,
                )


def refusals(parallel: Record, reference: Record) -> list[str]:
    """The reasons why equality of these two runs would prove nothing; empty when the comparison is
    a real one.
    """
    if not reference.steps or not parallel.steps:
        return ["no step was observed"]
    if len(reference.steps) != len(parallel.steps):
        return [
            f"the reference has {len(reference.steps)} steps and the parallel run "
            f"{len(parallel.steps)}"
        ]
    reasons = []
    for label, record in (("reference", reference), ("parallel run", parallel)):
        reasons += _empty(label, record)
        reasons += _aliased(label, record)
        for step, seen in enumerate(record.steps):
            if not math.isfinite(seen.loss):
                reasons.append(f"the loss of the {label} is {seen.loss} in step {step}")
            for kind, names in (
                ("gradient", non_finite(seen.grads)),
                ("parameter", non_finite(seen.params)),
                ("buffer", non_finite(seen.buffers)),
            ):
                if names:
                    reasons.append(
                        f"NaN or infinity in step {step} of the {label}: {kind} of "
                        f"{', '.join(names[:3])} ({len(names)} in all)"
                    )
    return reasons + _shared(parallel, reference)


def _empty(label: str, record: Record) -> list[str]:
    reasons = []
    if any(not seen.params for seen in record.steps):
        return [f"the {label} has no parameters"]
    dead = [step for step, seen in enumerate(record.steps) if largest(seen.grads) == 0.0]
    if dead:
        reasons.append(
            f"every gradient of the {label} is zero or absent in step {dead[0]}: two dead models "
            "agree"
        )
    for step, seen in enumerate(record.steps):
        before = record.before(step)
        if before is not None and all(
            name in before and torch.equal(before[name], value)
            for name, value in seen.params.items()
        ):
            reasons.append(f"no weight of the {label} moved in step {step}")
    return reasons


def _aliased(label: str, record: Record) -> list[str]:
    """Observations that are views of live parameters would all show the last step."""
    for step, seen in enumerate(record.steps):
        before = record.before(step)
        for name, value in seen.params.items():
            if before is not None and name in before and same_memory(value, before[name]):
                return [
                    f"the {label} shows the same memory for {name} before and after step {step}: "
                    "observe clones"
                ]
    return []


def _shared(parallel: Record, reference: Record) -> list[str]:
    for step, (mine, truth) in enumerate(zip(parallel.steps, reference.steps, strict=True)):
        for kind, ours, theirs in (
            ("gradient", mine.grads, truth.grads),
            ("parameter", mine.params, truth.params),
        ):
            for name in ours.keys() & theirs.keys():
                one = ours[name]
                other = theirs[name]
                if one is not None and other is not None and same_memory(one, other):
                    return [
                        f"the {kind} of {name} in step {step} is compared with itself (the same "
                        "memory)"
                    ]
    return []
