"""The one place where the loss, and with it every gradient, is normalised.

The loss of a step is the mean over the *global* number of unmasked tokens (or samples). It is the
sum of all losses, divided once by the sum of all counts, over all ranks and micro-batches. A mean
of means would be wrong as soon as two micro-batches count differently. Backward runs on the sums
over a divisor, on which all ranks have agreed. It is the sum of the counts where these are known
beforehand. Gradients are then those of the mean loss from the start. What is left of the division
is folded into the factor that the update applies to gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Axis
from plait.errors import DataError, ModelError, NonFiniteLoss
from plait.values import PyTree

LossFunction = Callable[[PyTree, PyTree], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class MetricSum:
    """A loss or another measure of outputs, added up over all ranks."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """The total over the count; NaN where nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class LossTotals:
    """Sums over all ranks and micro-batches of a step."""

    loss_sum: float
    count: float
    squared_norm: float
    tokens_per_count: float = 1.0
    """Above 1 where the loss counts samples and each of them is a sequence of tokens."""
    num_graphs: float = 1.0
    """Micro-batches whose loss has a gradient."""
    loss_divisor: float = 1.0
    """The number by which backward has divided the sum of the losses."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / self.count

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient of the mean loss."""
        return float(self.squared_norm**0.5) / self.gradient_divisor

    @property
    def gradient_divisor(self) -> float:
        """The number by which gradients become those of the mean loss."""
        return self.count / self.loss_divisor

    def check(self, step: int, *, norm: bool = True) -> None:
        """Refuse to update the weights by something that is no number; without `norm` the gradient
        will not be used.

        Raises:
            NonFiniteLoss: the loss or the gradient's norm is none.
            DataError: nothing was counted.
            ModelError: no loss had a gradient.
        """
        self.check_counts(step)
        wrong = self.not_finite(norm=norm)
        if wrong is not None:
            raise NonFiniteLoss(self.complaint(step, wrong))

    def check_counts(self, step: int) -> None:
        """Refuse a step that nothing can be learned from.

        Raises:
            DataError: nothing was counted.
            ModelError: no loss had a gradient.
        """
        if self.count == 0:
            raise DataError(
                f"step {step}: every target of the batch is masked; a mean over nothing is "
                "undefined"
            )
        if self.num_graphs == 0:
            raise no_gradient(step)

    def not_finite(self, *, norm: bool = True) -> str | None:
        """The first sum that is no finite number, with its value; None where all are."""
        known = (("loss", self.loss), ("gradient norm", self.squared_norm if norm else 0.0))
        wrong = (f"the {what} is {value}" for what, value in known if not math.isfinite(value))
        return next(wrong, None)

    @staticmethod
    def complaint(step: int, wrong: str) -> str:
        """The sentence for a step whose sums are no numbers."""
        return (
            f"step {step}: {wrong}; the parameters are still those of step {step - 1}. "
            "Try a lower lr, clip_grad_norm or more warmup_steps, or look at the batch of this step"
        )


def no_gradient(step: int) -> ModelError:
    """The fault of a loss that no parameter can be trained by."""
    return ModelError(
        f"step {step}: the loss has no gradient (its requires_grad is False), so no parameter can "
        "be trained. "
        "Return the loss as it is computed from the model's output, without detach(), item(), "
        "torch.tensor() or "
        "no_grad(); and let at least one parameter that the output depends on require a gradient"
    )


class LossSum:
    """Adds up this rank's losses and counts, micro-batch by micro-batch.

    Attributes:
        divisor: what backward divides the sum by; 0-dim where it is a tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self, divisor: float | Tensor = 1.0) -> None:
        """A step begins, whose gradients are those of the sum of the losses over `divisor`
        (0-dim).
        """
        self.divisor = divisor
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self.count = torch.zeros((), dtype=torch.float64, device=self._device)
        self.tokens = torch.zeros((), dtype=torch.float64, device=self._device)
        self.num_graphs = 0
        self._each: list[tuple[Tensor, Tensor]] = []

    def means(self) -> list[Tensor]:
        """The mean loss (0-dim) of each micro-batch of this rank, in their order; 0 for an empty
        one.
        """
        return [total / count.clamp(min=1.0) for total, count in self._each]

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """The loss and the count (0-dim) of each micro-batch of this rank, in their order."""
        return list(self._each)

    def add(
        self,
        loss: Tensor | tuple[Tensor, Tensor],
        num_samples: float,
        tokens_per_sample: int = 1,
    ) -> Tensor:
        """Take one micro-batch's loss, and return the divided sum (0-dim) that backward starts
        from.

        `loss` is `(sum, count)`, or a 0-dim tensor that means "the mean over the samples of this
        micro-batch". `num_samples`: this rank's share of them, as `MicroBatch.own_samples`. It is 0
        for a placeholder, which counts nothing and whose gradient is zero. The tokens are the
        counts that the loss gives, or `tokens_per_sample` of each sample.

        Raises:
            ModelError: None, a tensor with dims, or a tuple that is no (sum, count).
        """
        if loss is None:
            raise ModelError(
                "the loss function returned None; it must return a 0-dim tensor, or a tuple "
                "(sum, count) of them (is its last line a return?)"
            )
        if isinstance(loss, Mapping):
            raise ModelError(
                f"the loss function returned a mapping of {', '.join(map(str, loss))}; it must "
                "return a 0-dim tensor, or a tuple (sum, count) of them: give one value of it, "
                "or their sum"
            )
        if isinstance(loss, tuple):
            total, count = _sum_and_count(loss)
            count = torch.as_tensor(count, dtype=torch.float64, device=self._device)
            if num_samples == 0:
                total = total * 0.0
                count = count * 0.0
            tokens = count
            samples = 1.0
        else:
            total = loss
            samples = num_samples
            count = torch.full((), float(num_samples), dtype=torch.float64, device=self._device)
            tokens = count * tokens_per_sample
        if not isinstance(total, Tensor) or total.dim() != 0:
            shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ModelError(
                f"the loss must be a 0-dim tensor, or a tuple (sum, count) of them; it is {shape}"
            )
        added = total.detach() * samples
        self.loss_sum += added
        self.count += count
        self.tokens += tokens
        self.num_graphs += total.requires_grad
        self._each.append((added, count))
        share = samples / self.divisor
        if isinstance(share, Tensor):
            return total * share.to(total.dtype)
        return total if share == 1.0 else total * share

    def add_auxiliary(self, total: Tensor) -> None:
        """Take this rank's part (0-dim) of losses that are no function of the output. Their
        gradients have a path of their own.
        """
        self.loss_sum += total.to(self.loss_sum.device)

    def copy(self) -> LossSum:
        """The sums so far, which `reset` leaves as they are."""
        other = LossSum(self._device)
        other.divisor = self.divisor
        other.join(self)
        return other

    def kept(self) -> Callable[[], None]:
        """A function that brings back the sums of now: the same tensors, with new values."""
        known = {**vars(self), "_each": tuple(self._each)}
        return lambda: vars(self).update(known, _each=list(known["_each"]))

    def add_count(self, count: Tensor) -> None:
        """Count (0-dim) what another stage has computed a loss of."""
        self.count += count

    def join(self, earlier: LossSum) -> None:
        """Take the sums of earlier micro-batches of one step."""
        self.loss_sum += earlier.loss_sum
        self.count += earlier.count
        self.tokens += earlier.tokens
        self.num_graphs += earlier.num_graphs
        self._each = [*earlier._each, *self._each]

    def share_divisor(self, divisor: float) -> None:
        """Gradients of several batches, each with a divisor of its own, have this one together."""
        self.divisor = divisor

    def worker_weight(self, num_workers: int) -> float:
        """The factor that makes a sum over workers the mean of their means (a server's aggregate
        "mean").
        """
        return 1.0 / (num_workers * (float(self.count) or 1.0))


def _sum_and_count(loss: tuple[PyTree, ...]) -> tuple[Tensor, Tensor | float]:
    """The two parts of a loss; raises `ModelError` where the second cannot be a count."""
    second = loss[1] if len(loss) == 2 else None
    is_number = isinstance(second, int | float) or (isinstance(second, Tensor) and not second.dim())
    if is_number and not (isinstance(second, Tensor) and second.requires_grad):
        return loss
    if len(loss) != 2:
        what = f"{len(loss)} values"
    elif isinstance(second, Tensor):
        what = "a second tensor that has a gradient" if is_number else "a second tensor with dims"
    else:
        what = f"a {type(second).__name__} beside the loss"
    raise ModelError(
        f"the loss function returned {what}; a tuple means (sum, count), the count as a number "
        "without a gradient: return the loss alone, with other terms added to it"
    )


def summed(parts: Sequence[LossSum], copies: int, axes: Iterable[Axis]) -> list[MetricSum]:
    """The sums of all ranks, of which `copies` have computed each. Collective over every axis."""
    sums = torch.stack([torch.stack([part.loss_sum, part.count]) for part in parts]) / copies
    for axis in axes:
        axis.all_reduce(sums, control=True).wait()
    return [MetricSum(total, count) for total, count in sums.tolist()]
