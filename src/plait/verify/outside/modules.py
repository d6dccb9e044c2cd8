"""Which module is wrong first: outputs and their gradients of all modules, on both sides.

A sketch of eight numbers a sample is kept of each output, so memory does not grow with the model. A
sample's sketch on a rank is held against the same sample's on one device. Gradients of outputs may
be scaled alike, as a mean over fewer samples is. A module where the scale changes is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.values import PyTree
from plait.verify.diagnosis.finding import Finding
from plait.verify.outside.rows import Rows

WIDTH = 8
SLACK = 1e-6


@dataclass
class Sketch:
    """The output of one module in one call of the model, and its gradient: [samples, WIDTH]."""

    name: str
    call: int
    numel: int
    output: Tensor
    grad: Tensor | None = None


@dataclass
class Sketches:
    """All sketches of one step, in the order in which modules end."""

    found: list[Sketch] = field(default_factory=list)
    seen: set[tuple[int, str]] = field(default_factory=set)

    def add(self, name: str, call: int, output: PyTree) -> None:
        """Keep the first output of a module in a call."""
        leaf = next((one for one in tree_leaves(output) if type(one) is Tensor), None)
        if leaf is None or not leaf.is_floating_point() or leaf.dim() < 2 or not leaf.numel():
            return
        if (call, name) in self.seen:
            return
        self.seen.add((call, name))
        sketch = Sketch(name, call, leaf[0].numel(), sketched(leaf))
        self.found.append(sketch)
        if leaf.requires_grad:
            leaf.register_hook(_keeper(sketch))


def _keeper(sketch: Sketch) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        sketch.grad = sketched(grad)

    return keep


def sketched(value: Tensor) -> Tensor:
    """Each sample's projection on fixed random directions: [samples, ...] -> [samples, WIDTH]."""
    flat = value.detach().reshape(len(value), -1).double().cpu()
    generator = torch.Generator().manual_seed(flat.shape[1])
    chosen = torch.randn(flat.shape[1], WIDTH, generator=generator, dtype=torch.float64)
    return flat @ chosen / flat.shape[1] ** 0.5


@dataclass(frozen=True)
class ModuleError:
    """How far a module is from one device's, the largest over samples. `depth` counts from 0.

    A gradient's error is what is left after one scale for all modules of a call.
    """

    name: str
    depth: int
    output: float | None = None
    grad: float | None = None
    ranks: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()


def reference_sketches(model: nn.Module, run: Callable[[], Tensor]) -> list[Sketch]:
    """The sketches of one device; `run` gives the loss of the whole batch."""
    sketches = Sketches()
    handles = [
        module.register_forward_hook(_hook(sketches, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        run().backward()
    finally:
        for handle in handles:
            handle.remove()
    return sketches.found


def _hook(kept: Sketches, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: PyTree, output: PyTree) -> None:
        kept.add(name, 0, output)

    return hook


def compare(
    truth: Sequence[Sketch],
    ranks: Sequence[Sequence[Sketch]],
    rows: Sequence[Rows],
    slack: float = SLACK,
) -> list[ModuleError]:
    """The errors of all modules that could be compared, in forward order; `slack` passes."""
    known = {one.name: one for one in truth}
    first = next((one for one in rows if any(one)), ())
    sizes = [float(one.grad.abs().max()) for one in truth if one.grad is not None]
    floor = max(1e-9 * max(sizes, default=0.0), 1e-30)  # below it, a gradient is rounding
    outputs: dict[str, dict[tuple[int, int], float]] = {}
    grads: dict[str, dict[tuple[int, int], float]] = {}
    for rank, sketches in enumerate(ranks):
        own = rows[rank] if any(rows[rank]) else first
        for call in sorted({one.call for one in sketches}):
            index = own[call] if call < len(own) else ()
            same = [one for one in sketches if one.call == call and _fits(one, known, index)]
            scale = _scale(same, known, index)
            for one in same:
                at = (rank, call)
                part = known[one.name].output[list(index)]
                outputs.setdefault(one.name, {})[at] = _error(one.output, part)
                error = _grad_error(one, known[one.name], index, scale, floor)
                if error is not None:
                    grads.setdefault(one.name, {})[at] = error
    errors = []
    for depth, one in enumerate(truth):
        if one.name in outputs:
            worst = {**outputs[one.name]}
            for at, error in grads.get(one.name, {}).items():
                worst[at] = max(worst[at], error)
            wrong = [at for at, error in worst.items() if error > slack]
            errors.append(
                ModuleError(
                    one.name,
                    depth,
                    max(outputs[one.name].values()),
                    max(grads[one.name].values()) if one.name in grads else None,
                    tuple(dict.fromkeys(rank for rank, _ in wrong)),
                    tuple(dict.fromkeys(call for _, call in wrong)),
                )
            )
    return errors


def _fits(one: Sketch, known: Mapping[str, Sketch], index: Sequence[int]) -> bool:
    other = known.get(one.name)
    return (
        other is not None
        and one.numel == other.numel
        and len(one.output) == len(index) > 0
        and max(index) < len(other.output)
    )


def _scale(
    sketches: Sequence[Sketch], known: Mapping[str, Sketch], index: Sequence[int]
) -> float | None:
    """The scale of the last module's gradient, where the backward begins."""
    for one in reversed(sketches):
        truth = known[one.name].grad
        if one.grad is not None and truth is not None:
            part = truth[list(index)]
            energy = float(part.square().sum())
            return float((one.grad * part).sum()) / energy if energy else None
    return None


def _grad_error(
    one: Sketch, truth: Sketch, index: Sequence[int], scale: float | None, floor: float
) -> float | None:
    if one.grad is None or truth.grad is None or not scale:
        return None
    return _error(one.grad / scale, truth.grad[list(index)], floor)


def _error(value: Tensor, truth: Tensor, floor: float = 1e-30) -> float:
    size = max(float(truth.abs().max()), floor)
    return float((value - truth).abs().max()) / size


def first_wrong(errors: Sequence[ModuleError], slack: float = SLACK) -> list[Finding]:
    """The first module in forward order whose output is wrong.

    Without one, the first in backward order whose gradient is; without that, that none is.
    """
    if not errors:
        return []
    for one in errors:
        if one.output is not None and one.output > slack:
            what = f"the first output that differs is that of '{one.name}'"
            return [Finding("module", "", _place(what, one, one.output), 0.985, (one.name,))]
    for one in reversed(errors):
        if one.grad is not None and one.grad > slack:
            what = f"the first gradient of an output that differs is that of '{one.name}'"
            return [Finding("module", "", _place(what, one, one.grad), 0.985, (one.name,))]
    text = (
        f"the outputs of {len(errors)} modules and their gradients are right on every rank: the "
        "fault lies in what is done with the gradients of parameters, or after it"
    )
    return [Finding("modules-right", "", text, 0.3)]


def _place(what: str, one: ModuleError, error: float) -> str:
    ranks = ", ".join(map(str, one.ranks))
    calls = ", ".join(map(str, one.calls))
    return f"{what}, on rank {ranks} in micro-batch {calls} (relative error {error:.2g})"
