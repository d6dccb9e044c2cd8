"""Losses that modules add to the mean loss (balance of experts), on one device, with plain sums and
backward.

A module that has such a loss gives it by `auxiliary_loss()` after a forward: a mean over what that
forward saw. The mean over a step weighs the forwards by their samples. A balance loss is one of a
whole micro-batch. Where its slices run one after the other, `Together` tells routers of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plait.models.routing import Router, RouterContext


class Auxiliary:
    """Gathers values and gradients over the forwards of one step."""

    def __init__(self, model: nn.Module, num_samples: int) -> None:
        self.value = 0.0
        self.grads: dict[str, Tensor] = {}
        self._modules = [module for module in model.modules() if hasattr(module, "auxiliary_loss")]
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._num_samples = max(num_samples, 1)

    def add(self, num_samples: int) -> None:
        """Take in the forward that has just been; its graph is kept for the backward of the loss
        itself. `num_samples` are those that its losses are a mean over.
        """
        found = [module.auxiliary_loss() for module in self._modules]  # type: ignore[operator]
        losses = [loss for loss in found if loss is not None]
        if not losses:
            return
        share = num_samples / self._num_samples
        total = torch.stack([loss.reshape(()) for loss in losses]).sum() * share
        self.value += float(total.detach())
        grads = torch.autograd.grad(
            total, list(self._named.values()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(self._named, grads, strict=True):
            if grad is not None:
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad


class Together(RouterContext):
    """Loads of routers over a micro-batch whose slices run one after the other, one layer each.

    Every slice runs twice: first its tokens are counted, then its part of the loss is made.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self.total: Tensor | None = None

    def sizes(self, num_samples: int, num_positions: int) -> tuple[float, int]:
        """Samples of the whole micro-batch."""
        return float(self.num_samples or num_samples), num_positions

    def count_slices(self, num_samples: int) -> None:
        """A micro-batch of `num_samples` begins: its slices are counted first."""
        self.num_samples = num_samples
        self.total = None
        self.recording = False

    def record(self) -> None:
        """The counts are complete: the slices run again, with gradients."""
        self.recording = True

    def sum_tokens(self, counts: Tensor) -> Tensor:
        """The counts of all slices; in the first forward, those up to this one."""
        if not self.recording:
            self.total = counts if self.total is None else self.total + counts
        return counts if self.total is None else self.total


class Pool:
    """The routers of a model, with the facts of a whole micro-batch; possibly none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        self._layers = [Together() for _ in self._routers]

    @contextmanager
    def of(self, num_samples: int, forward: Callable[[], object] | None) -> Iterator[None]:
        """Routers know the counts of all slices inside; `forward` runs each of them once. None
        where the micro-batch runs as a whole.
        """
        if not self._routers or forward is None:
            yield
            return
        for router, layer in zip(self._routers, self._layers, strict=True):
            router.route_in(layer)
            layer.count_slices(num_samples)
        kept = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.no_grad():
            forward()
        for name, buffer in self._model.named_buffers():
            buffer.copy_(kept[name])
        for layer in self._layers:
            layer.record()
        yield
        for router in self._routers:
            router.route_in(RouterContext())
