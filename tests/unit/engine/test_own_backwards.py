"""A backward that makes a gradient of no gradient is told of, where a plan divides the batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import plait
from plait.comm import World
from plait.engine.loss import LossFunction
from plait.engine.own_backwards import makes_gradients
from tests.helpers.threaded import threaded

BATCH = torch.ones(4, 6), torch.zeros(4, 6)


class Largest(torch.autograd.Function):
    """Pulls the largest outputs to zero, as RWKV does."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        output = ctx.saved_tensors[0]
        largest, places = output.max(-1, keepdim=True)
        grad = torch.zeros_like(output)
        grad.scatter_(-1, places, 0.1 * largest / len(output))
        return grad_output, grad


class Scaled(Largest):
    """The same, times the gradient of the loss."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_loss, grad = Largest.backward(ctx, grad_output)
        return grad_loss, grad * grad_output


class Beside(torch.autograd.Function):
    """Adds a loss to the graph at a hidden state, as routers of experts do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_loss = None
        if ctx.needs_input_grad[1]:
            grad_loss = torch.ones((), dtype=ctx.dtype, device=grad_output.device)
        return grad_output, grad_loss


class Rounded(torch.autograd.Function):
    """A straight-through estimator, with a number beside the tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, step: float) -> Tensor:
        return (hidden / step).round() * step

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


class Product(torch.autograd.Function):
    """A product whose gradients are written into tensors that are made first."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        (grad,) = grads
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        torch.mm(grad, weight.t(), out=of_hidden)
        of_weight.add_(hidden.t() @ grad)
        return (of_hidden, of_weight) + (None,) * 0


class Again(torch.autograd.Function):
    """A forward that is run again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.tanh()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor | None:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = hidden.tanh()
        torch.autograd.backward(again, grad_output)
        return hidden.grad


class Packed(torch.autograd.Function):
    """A kernel that writes into slices of one tensor, as FlashAttention's packed function."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return packed.prod(-1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        packed = ctx.saved_tensors[0]
        grads = torch.empty_like(packed)
        kernel(grad_output, packed, grads[..., 0], grads[..., 1])
        return grads


def kernel(grad: Tensor, packed: Tensor, first: Tensor, second: Tensor) -> None:
    first.copy_(grad * packed[..., 1])
    second.copy_(grad * packed[..., 0])


class Net(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 6] -> the same."""
        hidden = self.first(x)
        if self.kind == "beside":
            hidden = Beside.apply(hidden, hidden.square().mean())
        if self.kind == "right":
            hidden = Again.apply(Product.apply(Rounded.apply(hidden, 0.1), self.last.weight))
        output: Tensor = self.last(hidden)
        return output


def step(world: World, plan: str, kind: str, loss: LossFunction) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = plait.build(Net(kind), plan, loss=loss, optimizer=SGD, world=world)
        for batch in engine.prepare([BATCH] * 2):
            engine.step(batch, trace=False)
    return [str(one.message) for one in said if "returns a gradient" in str(one.message)]


def largest(output: Tensor, targets: Tensor) -> Tensor:
    return Largest.apply(F.mse_loss(output, targets), output)


def scaled(output: Tensor, targets: Tensor) -> Tensor:
    return Scaled.apply(F.mse_loss(output, targets), output)


KINDS = [("", largest, "Largest"), ("beside", F.mse_loss, "Beside")]


@pytest.mark.parametrize(("kind", "loss", "name"), KINDS)
def test_a_gradient_of_no_gradient_is_told_once(kind: str, loss: LossFunction, name: str) -> None:
    (said,) = threaded(1, step, "mb2", kind, loss, plan="mb2")
    assert len(said) == 1
    assert said[0].startswith(f"{name}.backward returns a gradient that does not depend")


@pytest.mark.parametrize(("kind", "loss", "name"), KINDS)
def test_an_undivided_batch_trains_as_a_plain_loop(
    kind: str, loss: LossFunction, name: str
) -> None:
    assert threaded(1, step, "dp1", kind, loss, plan="dp1") == [[]]
    torch.manual_seed(0)
    engine = plait.build(Net(kind), "dp1", loss=loss, optimizer=SGD)
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = SGD(model.parameters())
    for _ in range(2):
        engine.step(BATCH, trace=False)
        optimizer.zero_grad()
        loss(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    for mine, param in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, param)


@pytest.mark.parametrize(("kind", "loss"), [("", scaled), ("right", F.mse_loss)])
def test_gradients_of_gradients_are_let_be(kind: str, loss: LossFunction) -> None:
    assert threaded(1, step, "mb2", kind, loss, plan="mb2") == [[]]


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        (Largest, True),
        (Beside, True),
        (Scaled, False),
        (Rounded, False),
        (Product, False),
        (Again, False),
        (Packed, False),
    ],
)
def test_the_source_of_a_backward_is_read(
    function: type[torch.autograd.Function], makes: bool
) -> None:
    assert makes_gradients(function) == makes
