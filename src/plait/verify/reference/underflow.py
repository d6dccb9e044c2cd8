"""Squares of gradients below the smallest normal number of a precision, as Adam keeps in float16.

Neighbouring numbers lie there as far apart as they are large. The last bit of a gradient of 0.0055
decides whether its second moment is zero or the smallest number. One update is then nine times the
other. Six runs with other rounding show this jump only by chance, so it is looked for. The
optimizer's rule is computed with each gradient at both ends of its bound. A state below the normal
numbers may then move further than in float64. One device then
runs twice more with those gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait import torch_internals
from plait.models.parameters import Parameters
from plait.values import PyTree
from plait.verify.record.observation import Record
from plait.verify.reference.recipe import Recipe

Place = tuple[int, str]
"""A step, and the name of a parameter."""
FURTHER = 2.0  # times the way of a state in float64: no rounding of a normal number does so


class Underflow:
    """How far each element of the gradients went in runs with other rounding."""

    def __init__(self, reference: Record, dtype: torch.dtype) -> None:
        self._reference = reference
        self._dtype = dtype
        self._furthest: dict[Place, Tensor] = {}

    def add(self, again: Record) -> None:
        """Take in one run."""
        for step, (mine, truth) in enumerate(zip(again.steps, self._reference.steps, strict=True)):
            for name, right in truth.grads.items():
                value = mine.grads.get(name)
                if value is not None and right is not None:
                    gap = (value - right).abs()
                    known = self._furthest.get((step, name), gap)
                    self._furthest[step, name] = torch.maximum(gap, known)

    def ways(self, factor: float) -> dict[Place, Tensor]:
        """How far each element of the gradients [...] may move: `factor` times its largest
        deviation so far, or times its last bit.
        """
        least = torch.finfo(self._dtype).eps
        ways = {}
        for (step, name), furthest in self._furthest.items():
            right = self._reference.steps[step].grads[name]
            assert right is not None
            ways[step, name] = factor * torch.maximum(furthest, right.abs() * least)
        return ways

    def jumps(self, recipe: Recipe, factor: float) -> dict[Place, Tensor]:
        """How far gradients [...] may move where the optimizer's state jumps within that; else 0.

        An element may move as in `ways`. Empty where no state jumps.
        """
        ways = self.ways(factor)
        jumping = self._jumping(recipe, ways)
        return {
            (step, name): way * jumping[name]
            for (step, name), way in ways.items()
            if name in jumping and bool((way * jumping[name]).any())
        }

    def _jumping(self, recipe: Recipe, ways: Mapping[Place, Tensor]) -> dict[str, Tensor]:
        """The elements whose state below the normal numbers goes further than in float64."""
        jumps: dict[str, Tensor] = {}
        least = torch.finfo(self._dtype).tiny
        near = self._states(recipe, self._dtype)
        if not any(bool((one.abs() < least).any()) for states in near.values() for one in states):
            return {}
        right = self._states(recipe, torch.float64)
        for up in (False, True):
            moved = at_the_end(recipe, ways, up)
            in_dtype = self._states(moved, self._dtype)
            in_double = self._states(moved, torch.float64)
            for (step, name), states in near.items():
                for place, state in enumerate(states):
                    other = in_dtype[step, name][place]
                    gap = (other - state).abs().double()
                    smooth = (in_double[step, name][place] - right[step, name][place]).abs()
                    below = (state.abs() < least) | (other.abs() < least)
                    jump = below & (gap > FURTHER * smooth)
                    jumps[name] = jump | jumps.get(name, jump)
        return jumps

    def _states(self, recipe: Recipe, dtype: torch.dtype) -> dict[Place, list[Tensor]]:
        """The optimizer's state of each element, after each step with the reference's gradients."""
        start = self._reference.start
        assert start is not None
        names = dict.fromkeys(name for _, name in self._furthest)
        params = {name: nn.Parameter(start[name].to(dtype, copy=True)) for name in names}
        optimizer = recipe.made(Parameters(list(params.items())))
        states: dict[Place, list[Tensor]] = {}
        for step, seen in enumerate(self._reference.steps):
            before = self._reference.before(step)
            assert before is not None
            for name, parameter in params.items():
                grad = seen.grads.get(name)
                parameter.data.copy_(before[name])
                parameter.grad = None if grad is None else grad.to(dtype, copy=True)
            torch_internals.step(optimizer)
            for name, parameter in params.items():
                states[step, name] = [
                    value.detach().clone()
                    for value in optimizer.state.get(parameter, {}).values()
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    if parameter.dim()
                ]
        return states


def at_the_end(recipe: Recipe, ways: Mapping[Place, Tensor], up: bool) -> Recipe:
    """A recipe whose updates see gradients as large, or as small, as `ways` let them be. Each has
    the shape of its gradient.
    """

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        assert isinstance(params, Parameters)
        optimizer = recipe.made(params)
        named = dict(params.named())
        step = 0

        def hook(one: Optimizer, args: PyTree, kwargs: PyTree) -> None:
            nonlocal step
            for name, parameter in named.items():
                way = ways.get((step, name))
                if way is not None and parameter.grad is not None:
                    parameter.grad = _moved(parameter.grad, way if up else -way)
            step += 1

        optimizer.register_step_pre_hook(hook)
        return optimizer

    return replace(recipe, optimizer=make)


def _moved(grad: Tensor, way: Tensor) -> Tensor:
    """Gradients of another size and the same sign; those without a way stay."""
    size = (grad.abs() + way.to(grad)).clamp(min=0)
    return torch.where(way == 0, grad, size.copysign(grad))
