"""Split a backward: the gradient of a layer's input at once, the gradient of its weight later.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Layers that are a product with a weight
(linear, convolution) run as a function whose backward may note what the weight's gradient is made from instead of
making it. Whatever else has parameters (norms, embeddings)
makes their gradients with that of its input: these cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[..., Tensor]
Params = tuple[Tensor, Tensor | None]  # weight and bias


class Deferred:
    """Weight gradients that have been left for later, of one micro-batch."""

    def __init__(self) -> None:
        self._made_from: list[tuple[_Recipe, Params, Tensor, Tensor]] = []

    def add(self, recipe: _Recipe, params: Params, source: Tensor, grad: Tensor) -> None:
        """What the gradients of `params` will be made from; they are named now, as another stage may use others later."""
        self._made_from.append((recipe, params, source, grad))

    def run(self) -> None:
        """Make them, as backward would have: hooks on the parameters see nothing else."""
        made_from, self._made_from = self._made_from, []
        for recipe, params, source, grad in made_from:
            found = zip(params, recipe.weight_grads(source, grad, params), strict=False)
            pairs = [(p, g) for p, g in found if p is not None and p.requires_grad]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])


class Deferral:
    """The switch of one stage: inside `collect`, weight gradients are noted."""

    def __init__(self) -> None:
        self.open: Deferred | None = None

    @contextmanager
    def collect(self) -> Iterator[Deferred]:
        """A backward inside leaves its weight gradients in what this yields."""
        self.open = Deferred()
        try:
            yield self.open
        finally:
            self.open = None

    def install(self, modules: Iterable[nn.Module]) -> int:
        """Let the layers that can be deferred run through here; how many they are."""
        num = 0
        for module in modules:
            recipe = _recipe(module)
            if recipe is not None:
                module.forward = _forward(recipe, self)
                num += 1
        return num


class _Recipe:
    """A layer that is a product with a weight: its forward, its input's gradient, its weights' gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def params(self) -> Params:
        return self.module.weight, self.module.bias

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return grad @ weight

    def weight_grads(self, x: Tensor, grad: Tensor, params: Params) -> Iterator[Tensor]:
        """Of the weight, and of the bias if there is one."""
        flat = grad.reshape(-1, grad.shape[-1])
        yield flat.t() @ x.reshape(-1, x.shape[-1])
        if params[1] is not None:
            yield flat.sum(0)


class _Transposed(_Recipe):
    """`x @ weight + bias`, as Hugging Face's GPT-2 has it."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = x @ weight
        return product if bias is None else product + bias

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return grad @ weight.t()

    def weight_grads(self, x: Tensor, grad: Tensor, params: Params) -> Iterator[Tensor]:
        flat = grad.reshape(-1, grad.shape[-1])
        yield x.reshape(-1, x.shape[-1]).t() @ flat
        if params[1] is not None:
            yield flat.sum(0)


class _Convolution(_Recipe):
    def _backward(self, x: Tensor, weight: Tensor, grad: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        conv = self.module
        bias_sizes = None if conv.bias is None else [conv.out_channels]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            bias_sizes,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.stride),
            conv.groups,
            mask,
        )
        return found

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = self.module
        return torch.convolution(
            x, weight, bias, conv.stride, conv.padding, conv.dilation, False, [0] * len(conv.stride), conv.groups
        )

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self._backward(x, weight, grad, [True, False, False])[0]

    def weight_grads(self, x: Tensor, grad: Tensor, params: Params) -> Iterator[Tensor]:
        weight, bias = params
        found = self._backward(x, weight, grad, [False, True, bias is not None])
        yield found[1]
        if bias is not None:
            yield found[2]


def _recipe(module: nn.Module) -> _Recipe | None:
    """How a module is a product with its weight; None where it is not, or not by torch's own forward."""
    if "forward" in vars(module):
        return None
    own = type(module).forward
    if own is nn.Linear.forward:
        return _Recipe(module)
    if own in (nn.Conv1d.forward, nn.Conv2d.forward) and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return _Convolution(module)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return _Transposed(module)
    return None


def _forward(recipe: _Recipe, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight, bias = recipe.params()
        output: Tensor = _Product.apply(x, weight, bias, (recipe, deferral))
        return output

    return forward


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[_Recipe, Deferral]) -> Tensor:
        ctx.save_for_backward(x, weight)
        (ctx.recipe, ctx.deferral), ctx.params = how, (weight, bias)
        return how[0].forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        recipe: _Recipe = ctx.recipe
        input_grad = recipe.input_grad(x, weight, grad) if ctx.needs_input_grad[0] else None
        if not (ctx.needs_input_grad[1] or (ctx.params[1] is not None and ctx.needs_input_grad[2])):
            return input_grad, None, None, None
        if ctx.deferral.open is not None:
            ctx.deferral.open.add(recipe, ctx.params, x, grad)
            return input_grad, None, None, None
        made = list(recipe.weight_grads(x, grad, ctx.params))
        return input_grad, made[0], made[1] if len(made) > 1 else None, None
