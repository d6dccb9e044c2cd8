"""Split a backward: the gradient of a layer's input at once, the gradient of its weight later,
added where it belongs.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Layers that are a product
with a weight (linear, convolution) run as a function whose backward may note what the weight's
gradient is made from instead of making it. Whatever else has parameters (norms, embeddings) makes
their gradients with that of its input: these cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.products import Products
from plait.torch_internals import has_function_transforms

Params = tuple[Tensor, ...]
MadeFrom = tuple["_Recipe", Params, Tensor, Tensor]
"""A layer, its parameters, its input, the gradient of its output."""


class Sink(Protocol):
    """The place where a parameter's gradients add up."""

    @property
    def dtype(self) -> torch.dtype:
        """What it takes."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right, two matrices."""

    def add(self, grad: Tensor) -> None:
        """Add a tensor of the parameter's shape."""


class Deferred:
    """Weight gradients that have been left for later, of one micro-batch."""

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral
        self._made_from: list[MadeFrom] = []

    def add(self, recipe: _Recipe, params: Params, source: Tensor, grad: Tensor) -> None:
        """What a gradient will be made from."""
        self._made_from.append((recipe, params, source, grad))

    def take(self, other: Deferred) -> None:
        """Take over what another micro-batch of the same stage has left, to be made with the
        own.
        """
        self._made_from = other._made_from + self._made_from
        other._made_from = []

    def run(self) -> None:
        """Make them: into their sinks, or as backward would have, so that hooks on the parameters
        see nothing else.

        A layer's rows of several micro-batches make one product.
        """
        by_layer = _by_layer(self._made_from)
        self._made_from = []
        made: list[tuple[Params, list[Tensor]]] = []
        with torch.no_grad():
            while by_layer:
                for one in _joined(by_layer.pop()):
                    if not self._deferral.deposit(*one):
                        made.append((one[1], one[0].weight_grads(*one[1:])))
        for params, grads in made:
            pairs = [(p, g) for p, g in zip(params, grads, strict=False) if p.requires_grad]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])


def _by_layer(made_from: Sequence[MadeFrom]) -> list[list[MadeFrom]]:
    """What each layer left, the last layer first."""
    found: dict[tuple[int, ...], list[MadeFrom]] = {}
    for one in made_from:
        found.setdefault((id(one[0]), *map(id, one[1])), []).append(one)
    return list(found.values())[::-1]


def _joined(parts: list[MadeFrom]) -> list[MadeFrom]:
    """What one layer left of several micro-batches, as one where its recipe allows."""
    recipe, params = parts[0][:2]
    if len(parts) == 1 or not recipe.joins:
        return parts
    rows = [
        (x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])) for _, _, x, grad in parts
    ]
    return [
        (recipe, params, torch.cat([x for x, _ in rows]), torch.cat([grad for _, grad in rows]))
    ]


class Deferral:
    """The switch of one stage: inside `collect`, weight gradients are noted. `sinks`, by id of the
    parameter, take them.
    """

    def __init__(self, products: Products | None = None) -> None:
        self.products = Products() if products is None else products
        self.open: Deferred | None = None
        self.sinks: Mapping[int, Sink] = {}

    @contextmanager
    def collect(self) -> Iterator[Deferred]:
        """A backward inside leaves its weight gradients in what this yields."""
        self.open = Deferred(self)
        try:
            yield self.open
        finally:
            self.open = None

    def deposit(self, recipe: _Recipe, params: Params, x: Tensor, grad: Tensor) -> bool:
        """Add a layer's weight gradients to their sinks; False, and nothing done, where one has
        none that takes them.

        To be called where torch records no gradients, as in a backward.
        """
        sinks = [
            sink
            for param in params
            if (sink := self.sinks.get(id(param))) is not None and sink.dtype == grad.dtype
        ]
        if len(sinks) < len(params):
            return False
        recipe.deposit(params, (x, grad), sinks)
        return True

    def install(self, modules: Iterable[nn.Module], *, quicker_only: bool = False) -> int:
        """Let the layers that can be deferred, or that `products` may make quicker, run through
        here; how many they are.
        """
        num = 0
        for module in modules:
            recipe = _recipe(module, self.products)
            if recipe is not None and (recipe.by_products or not quicker_only):
                module.forward = _forward(recipe, self, quicker_only)
                num += 1
        return num


class _Recipe:
    """A layer that is a product with a weight: its forward, its input's gradient, its weights'
    gradients.

    `joins`: rows of several inputs may be laid under each other. `by_products`: `products`
    multiply.
    """

    joins = by_products = True

    def __init__(self, module: nn.Module, products: Products) -> None:
        self.module: Any = module
        self.products = products

    def gains(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `products` multiply quicker than the layer itself would."""
        return self.products.gains(x, weight.shape[0])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.products.linear(x, weight, bias)

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self.products.product(grad, weight)

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the weight's gradient."""
        return grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])

    def weight_grads(self, params: Params, x: Tensor, grad: Tensor) -> list[Tensor]:
        """One for each of `params`: the weight, and the bias if there is one."""
        left, right = self.factors(x, grad)
        return [
            self.products.weight_grad(left, right),
            *([grad.reshape(-1, grad.shape[-1]).sum(0)] if len(params) > 1 else []),
        ]

    def deposit(
        self, params: Params, made_from: tuple[Tensor, Tensor], sinks: Sequence[Sink]
    ) -> None:
        """Add what `weight_grads` gives to a sink each."""
        x, grad = made_from
        factors = self.factors(x, grad)
        summed = self.products.summed(*factors)
        if summed is None:
            sinks[0].add_product(*factors)
        else:
            sinks[0].add(summed)
        if len(params) > 1:
            sinks[1].add(grad.reshape(-1, grad.shape[-1]).sum(0))


class _Transposed(_Recipe):
    """`x @ weight + bias`, as Hugging Face's GPT-2 has it."""

    def gains(self, x: Tensor, weight: Tensor) -> bool:
        return self.products.gains(x, weight.shape[1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.products.linear(x, weight.t(), bias)

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self.products.product(grad, weight.t())

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(-1, x.shape[-1]).t(), grad.reshape(-1, grad.shape[-1])


class _Convolution(_Recipe):
    joins = by_products = False

    def _backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, mask: list[bool]
    ) -> tuple[Tensor, ...]:
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
            x,
            weight,
            bias,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.stride),
            conv.groups,
        )

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self._backward(x, weight, grad, [True, False, False])[0]

    def weight_grads(self, params: Params, x: Tensor, grad: Tensor) -> list[Tensor]:
        return list(
            self._backward(x, params[0], grad, [False, True, len(params) > 1])[1 : 1 + len(params)]
        )

    def deposit(
        self, params: Params, made_from: tuple[Tensor, Tensor], sinks: Sequence[Sink]
    ) -> None:
        for sink, made in zip(sinks, self.weight_grads(params, *made_from), strict=True):
            sink.add(made)


def _recipe(module: nn.Module, products: Products) -> _Recipe | None:
    """How a module is a product with its weight; None where it is not, or not by torch's own
    forward.
    """
    if "forward" in vars(module):
        return None
    own = type(module).forward
    if own is nn.Linear.forward:
        return _Recipe(module, products)
    if (
        own in (nn.Conv1d.forward, nn.Conv2d.forward)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return _Convolution(module, products)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return _Transposed(module, products)
    return None


def _forward(recipe: _Recipe, deferral: Deferral, quicker_only: bool) -> Callable[[Tensor], Tensor]:
    """Through a function of ours. With `quicker_only` the layer's own forward stays where nothing
    would be gained.
    """
    module = recipe.module
    original = recipe.module.forward

    def forward(x: Tensor) -> Tensor:
        if quicker_only and (not recipe.gains(x, module.weight) or has_function_transforms()):
            plain: Tensor = original(x)
            return plain
        output: Tensor = _Product.apply(x, module.weight, module.bias, (recipe, deferral))
        return output

    return forward


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[_Recipe, Deferral]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        params = (
            (weight,) if bias is None else (weight, bias)
        )  # a module may have others by the time of its backward
        ctx.how = (*how, params)
        return how[0].forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        how: tuple[_Recipe, Deferral, Params] = ctx.how
        recipe, deferral, params = how
        wanted = ctx.needs_input_grad[1 : 1 + len(params)]
        input_grad = recipe.input_grad(x, weight, grad) if ctx.needs_input_grad[0] else None
        if not any(wanted):
            return input_grad, None, None, None
        if deferral.open is not None:
            deferral.open.add(recipe, params, x, grad)
            return input_grad, None, None, None
        if all(wanted) and deferral.deposit(recipe, params, x, grad):
            return input_grad, None, None, None
        made = recipe.weight_grads(params, x, grad)
        return input_grad, made[0], made[1] if len(made) > 1 else None, None
