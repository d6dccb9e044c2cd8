"""AdamW of tensors in two precisions: the rule, and what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.outer import DeviceChange


@dataclass(frozen=True)
class Rule:
    """The numbers of AdamW for one group of parameters, at one step.

    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization (ICLR 2019),
    algorithm 2. `factor` multiplies the gradient first. Where a device has decided about the
    update, `on_device` has the factor, and whether anything changes.
    """

    rate: float
    betas: tuple[float, float]
    epsilon: float
    decay: float
    factor: float
    on_device: DeviceChange | None = None


@dataclass(frozen=True)
class AdamWTensors:
    """The tensors of one parameter [...] that stay where they are from step to step.

    `value`, `mean` and `square` are in float32, `copy` in the layers' precision. `step`, 0-dim in
    float32, has counted the running step already.
    """

    value: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor
    step: Tensor

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tensors of the parameter's shape."""
        return self.value, self.mean, self.square, self.copy

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.value.numel()


Kernel = Callable[[Sequence[Tensor], Rule], None]
"""Updates the kept tensors that it was made for by their gradients [...], one each."""


def plain_kernel(kept: Sequence[AdamWTensors]) -> Kernel:
    """The rule in torch's own operations, by which kernels are judged."""

    def update(grads: Sequence[Tensor], rule: Rule) -> None:
        for one, grad in zip(kept, grads, strict=True):
            _update(one, grad, rule)

    return update


def _update(one: AdamWTensors, given: Tensor, rule: Rule) -> None:
    first, second = rule.betas
    step = float(one.step)
    factor: float | Tensor = rule.factor
    if rule.on_device is not None:
        if float(rule.on_device.blocked):
            return
        factor = rule.on_device.factor.float()
    grad = given.float() * factor
    one.mean.lerp_(grad, 1 - first)
    one.square.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = (1 - second**step) ** 0.5
    size = rule.rate / (1 - first**step)
    one.value.mul_(1 - rule.rate * rule.decay)
    one.value.addcdiv_(one.mean, (one.square.sqrt() / root).add_(rule.epsilon), value=-size)
    one.copy.copy_(one.value)
