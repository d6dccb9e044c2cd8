"""A finding: one sentence about what an error looks like, and the axis or option that it points to.

Beside it are the numbers of the run that a wrong factor may be. The small fits (a scale, a sum of
contributions) make findings. Everything here is arithmetic on tensors that were observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from plait.values import JsonObject
from plait.verify.record.observation import Gradients


@dataclass(frozen=True)
class Finding:
    """One explanation of an error. `cause` is a stable word. `axis` is a mesh axis (dp, tp, pp, cp,
    ep, mb) or an option, several joined by `+`. Options are init, clip, optimizer, lr, data, loss.
    `confidence` is in (0, 1]; `names` are the parameters concerned.
    """

    cause: str
    axis: str
    text: str
    confidence: float
    names: tuple[str, ...] = ()

    def as_dict(self) -> JsonObject:
        """The record in a report."""
        return {
            "cause": self.cause,
            "axis": self.axis,
            "text": self.text,
            "confidence": self.confidence,
            "names": list(self.names),
        }


@dataclass(frozen=True)
class Factor:
    """A number of the run: `text` completes "too large: ..."."""

    value: float
    axis: str
    text: str


WORDS = {
    "mb": "the number of micro-batches",
    "dp": "the number of data ranks",
    "dp_replicate": "the number of replicas of each shard",
    "tp": "the number of tensor ranks",
    "pp": "the number of pipeline ranks",
    "cp": "the number of context ranks",
    "ep": "the number of expert ranks",
}


@dataclass(frozen=True)
class Facts:
    """Numbers of the parallel run: axis sizes (`mb` too), other numbers by name, and the ranks
    along each axis.

    `lines["tp"]` are tuples of ranks, as `Mesh` gives them; ranks are the keys of
    `Observation.ranks`.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def factors(self) -> list[Factor]:
        """Every number that a wrong factor may be, simplest first: sizes, other numbers, products
        of two sizes.
        """
        known = [
            Factor(size, axis.split("_")[0], WORDS.get(axis, f"the size of {axis}"))
            for axis, size in self.sizes.items()
            if size > 1
        ]
        known += [
            Factor(value, "", name)
            for name, value in self.numbers.items()
            if value not in (0.0, 1.0)
        ]
        sizes = [one for one in known if one.axis]
        known += [
            Factor(a.value * b.value, f"{a.axis}+{b.axis}", f"{a.text} times {b.text}")
            for a, b in combinations(sizes, 2)
            if a.axis != b.axis
        ]
        return known

    def explain(self, ratio: float) -> tuple[str, str]:
        """(axis, clause) for a factor: `4.0000 times too large: the number of micro-batches`."""
        size = abs(ratio)
        if size == 0.0:
            return "", "zero"
        sign = "with the wrong sign and " if ratio < 0 else ""
        direction = (
            f"{sign}{_digits(size)} times too large"
            if size >= 1
            else f"{sign}{_digits(1 / size)} times too small"
        )
        if abs(size - 1) < 1e-4:
            direction = "of the wrong sign" if ratio < 0 else "right"
        found = [
            one for one in self.factors() if _near(size, one.value) or _near(size, 1 / one.value)
        ]
        simplest = [one for one in found if "+" not in one.axis] or found
        texts = list(dict.fromkeys(one.text for one in simplest))
        axes = list(dict.fromkeys(one.axis for one in simplest if one.axis))
        return "+".join(axes), direction + (f": {' or '.join(texts[:3])}" if texts else "")


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * abs(other)


def _digits(value: float) -> str:
    return f"{value:.4f}" if value < 1e4 else f"{value:.4e}"


@dataclass(frozen=True)
class Fit:
    """`value` is about `scale` times the other side; `residual` is what is left, relative to
    `value`.
    """

    scale: float
    residual: float

    def holds(self, slack: float) -> bool:
        """The fit explains the value up to `slack`."""
        return self.residual <= slack


def dot(first: Gradients, second: Gradients) -> float:
    """The inner product over the names that both have."""
    total = 0.0
    for name in first.keys() & second.keys():
        one = first[name]
        other = second[name]
        if one is not None and other is not None and one.shape == other.shape:
            total += float(one.double().flatten() @ other.double().flatten())
    return total


def fit_scale(value: Gradients, truth: Gradients) -> Fit:
    """Least squares for value = scale * truth, over all tensors of both together."""
    return fit_tensors(_stack(value, truth), _stack(truth, value))


def fit_tensors(value: Tensor, truth: Tensor) -> Fit:
    """Least squares for one pair of tensors [...] of one shape."""
    size = float(value.norm())
    energy = float(truth.square().sum())
    if energy == 0.0 or size == 0.0:
        return Fit(0.0, 0.0 if size == 0.0 else 1.0)
    scale = float((value.flatten() @ truth.flatten()) / energy)
    return Fit(scale, float((value - scale * truth).norm()) / size)


def _stack(first: Gradients, second: Gradients) -> Tensor:
    """`first` as one float64 vector, over the names that both have, zeros for None."""
    parts = []
    for name in sorted(first.keys() & second.keys()):
        one = first[name]
        other = second[name]
        if one is not None:
            parts.append(one.double().flatten())
        elif other is not None:
            parts.append(torch.zeros(other.numel(), dtype=torch.float64))
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)


def coefficients(value: Gradients, basis: Sequence[Gradients]) -> tuple[list[float], float] | None:
    """c with value = sum of c[i] * basis[i] by least squares, and the residual relative to |value|;
    None when c is not unique.

    It works on the Gram matrix, so that memory is that of the tensors themselves.
    """
    size = len(basis)
    gram = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(i + 1):
            gram[i, j] = gram[j, i] = dot(basis[i], basis[j])
    right = torch.tensor([dot(value, one) for one in basis], dtype=torch.float64)
    scale = gram.diagonal().sqrt()
    used = [i for i in range(size) if float(scale[i]) > 0]
    total = dot(value, value)
    if not used or total == 0.0:
        return None
    normal = gram[used][:, used] / scale[used].outer(scale[used])
    if float(torch.linalg.eigvalsh(normal)[0]) < 1e-6:
        return None
    solved = torch.linalg.solve(normal, right[used] / scale[used]) / scale[used]
    factors = [math.nan] * size
    for place, i in enumerate(used):
        factors[i] = float(solved[place])
    remainder = {
        name: None if grad is None else grad.double().clone() for name, grad in value.items()
    }
    for i in used:
        for name, grad in basis[i].items():
            present = remainder.get(name)
            if grad is not None and present is not None:
                present -= factors[i] * grad.double()
    return factors, math.sqrt(max(dot(remainder, remainder), 0.0) / total)


def reach(value: Gradients, basis: Sequence[Gradients]) -> float:
    """How far a coefficient moves at most, for each unit by which `value` does, relative to itself.

    The Gram matrix is inverted. The root of its largest diagonal element counts, times the norm
    of `value`.
    """
    size = len(basis)
    rows = [[dot(one, other) for other in basis] for one in basis]
    gram = torch.tensor(rows, dtype=torch.float64)
    used = [i for i in range(size) if float(gram[i, i]) > 0]
    if not used:
        return 0.0
    inverse = torch.linalg.inv(gram[used][:, used])
    return math.sqrt(dot(value, value) * max(float(inverse.diagonal().max()), 0.0))
