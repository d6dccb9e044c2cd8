"""Modules that look at all samples of a micro-batch, where ranks have different ones.

A batch norm takes its statistics over them, and a mixture the balance of its experts. They get the
samples of all ranks, compute alike, and give back those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import NotAvailable
from plait.mesh.layouts import INVARIANT, Sharded
from plait.parallel.tensor.group import ActivationLayout, ForwardContext, TensorGroup
from plait.values import PyTree

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class WholeSamples:
    """The way from this rank's samples to those of all ranks, and back.

    Rows that only fill up a rank's part are left out between.
    """

    def __init__(self, axis: Axis, context: ForwardContext) -> None:
        self._axis = axis
        self._context = context

    def enter(self, x: Tensor) -> Tensor:
        """[samples / ranks, ...] -> [samples, ...], alike on every rank.

        Collective and differentiable. The rows that fill up the last ranks' parts are left out. A
        sample may have several rows, as flattened positions; then nothing may need to be filled up.
        Raises `NotAvailable` where it does.
        """
        whole = transition(x, self._axis, Sharded(0), INVARIANT)
        samples, size = self._context.num_rows or len(whole), self._axis.size
        if len(whole) == samples + -samples % size:
            return whole[:samples]
        if samples % size:
            raise NotAvailable(
                f"a batch norm gets {len(whole)} rows of {samples} samples under a grid that gives "
                f"samples to {size} ranks; give a micro-batch a number that {size} divides"
            )
        return whole

    def leave(self, y: Tensor) -> Tensor:
        """[samples, ...] of all ranks -> [samples / ranks, ...] of this one, without communication.

        Copies of the first fill the division up. Differentiable; backward is collective.
        """
        missing = -len(y) % self._axis.size
        if missing:
            y = torch.cat([y, y[:1].expand(missing, *y.shape[1:])])
        return transition(y, self._axis, INVARIANT, Sharded(0))

    def surround(self, module: nn.Module) -> None:
        """Give a module the samples of all ranks."""

        def before(module: nn.Module, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
            return (self.enter(args[0]), *args[1:])

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda module, args, y: self.leave(y))


def watch_buffers(model: nn.Module, samples: Axis | None, text: str) -> None:
    """Refuse modules that write what they see of their samples into buffers.

    Where ranks have other samples these would hold other values. Batch norms see all samples.
    """
    if samples is None or samples.size == 1:
        return
    for name, module in model.named_modules():
        kept = set(module._buffers) - module._non_persistent_buffers_set
        if kept and not isinstance(module, BATCH_NORMS):
            watch = _BufferWatch(f"'{name}' ({type(module).__name__})", tuple(sorted(kept)), text)
            module.register_forward_pre_hook(watch.before)
            module.register_forward_hook(watch.after)


class _BufferWatch:
    """Two hooks that see whether a forward in training writes a module's buffers."""

    def __init__(self, label: str, keys: tuple[str, ...], text: str) -> None:
        self._label = label
        self._keys = keys
        self._text = text
        self._seen: list[tuple[int, int]] = []

    def _state(self, module: nn.Module) -> list[tuple[int, int]]:
        buffers = [module._buffers.get(key) for key in self._keys]
        return [(id(one), one._version) for one in buffers if one is not None]

    def before(self, module: nn.Module, args: object) -> None:
        """Remember the buffers."""
        self._seen = self._state(module)

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """Raise `NotAvailable` where one of them is another now."""
        if module.training and self._state(module) != self._seen:
            raise NotAvailable(
                f"{self._label} writes into its buffers ({', '.join(self._keys)}) in its forward, "
                f"and {self._text} gives ranks other samples; use tpN:1d"
            )


class WholeSequences:
    """The way from this rank's positions to whole sequences, and back."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def enter(self, x: Tensor) -> Tensor:
        """[batch, sequence / ranks, ...] -> [batch, sequence, ...], alike on every rank.

        Collective and differentiable.
        """
        return transition(x, self._axis, Sharded(1), INVARIANT)

    def leave(self, y: Tensor) -> Tensor:
        """[batch, sequence, ...] -> [batch, sequence / ranks, ...], without communication.

        Differentiable; backward is collective. Raises `PlanError` where ranks do not divide.
        """
        return transition(y, self._axis, INVARIANT, Sharded(1))


@runtime_checkable
class OpenMixture(Protocol):
    """A mixture of experts whose tokens may come from and go to other positions."""

    def open(self, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]) -> None:
        """Route whole sequences: `enter` makes them of the parts here, `leave` cuts the results.

        Under sequence parallel these are [batch, sequence / ranks, features] and back. Under a grid
        they are [samples / ranks, ...] and back.
        """


def open_mixture(
    name: str,
    mixture: nn.Module,
    stream: ActivationLayout,
    group: TensorGroup,
    context: ForwardContext,
) -> None:
    """Let a mixture route all tokens where the stream has them in parts.

    Raises `NotAvailable` where features are in parts too.
    """
    if stream == ActivationLayout():
        return
    doors: WholeSamples | WholeSequences
    if not isinstance(mixture, OpenMixture) or stream.features is not None:
        raise NotAvailable(
            f"{group} cuts the tokens or features that '{name}' routes; experts run under tpN:1d"
        )
    if stream.sequence is not None:
        doors = WholeSequences(stream.sequence)
    else:
        assert stream.samples is not None
        doors = WholeSamples(stream.samples, context)
    mixture.open(doors.enter, doors.leave)
