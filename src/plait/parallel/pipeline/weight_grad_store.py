"""Split a backward: the gradient of a layer's input now, the gradient of its weight later.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Layers that are a product
with a weight (linear, convolution) run as a function of their own. Its backward may store the
factors of the weight's gradient instead of multiplying them. Other layers with parameters (norms,
embeddings) compute all gradients at once: these cost little.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from plait.forwards import give_forward
from plait.products import Products
from plait.torch_internals import has_function_transforms
from plait.values import AutogradContext

Params = tuple[Tensor, ...]
FEWEST_ADDED = 1 << 19
"""Elements of a weight whose gradient is better added by the layer itself, on a processor.

A smaller gradient stays in the cache of a core, and Python's own time is longer.
"""
WeightGradTask = tuple["_WeightLayer", Params, Tensor, Tensor]
"""A layer, its parameters, its input, the gradient of its output."""


class GradAccumulator(Protocol):
    """The accumulator of a parameter's gradients (its main_grad)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients that can be added."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [rows, k] @ right [k, columns] to a gradient [rows, columns]."""

    def add(self, grad: Tensor) -> None:
        """Add a tensor of the parameter's shape [...]."""


class WeightGradTasks:
    """The weight gradients of one micro-batch that are left for later."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self._tasks: list[WeightGradTask] = []

    def add(self, layer: _WeightLayer, params: Params, source: Tensor, grad: Tensor) -> None:
        """Store the factors of a weight gradient.

        For a linear layer `source` is its input [..., in] and `grad` its output's gradient [...,
        out]. For a convolution they are [B, channels, ...].
        """
        self._tasks.append((layer, params, source, grad))

    def take(self, other: WeightGradTasks) -> None:
        """Take over the tasks of another micro-batch of the stage, to be computed together."""
        self._tasks = other._tasks + self._tasks
        other._tasks = []

    def run(self) -> None:
        """Compute the gradients, into their main_grads or as backward would.

        Hooks on the parameters see no difference. A layer's rows of several micro-batches make one
        product.
        """
        by_layer = _by_layer(self._tasks)
        self._tasks = []
        computed: list[tuple[Params, list[Tensor]]] = []
        with torch.no_grad():
            while by_layer:
                for layer, params, source, grad in _batched(by_layer.pop()):
                    if not self._store.accumulate(layer, params, source, grad):
                        computed.append((params, layer.weight_grads(params, source, grad)))
        for params, grads in computed:
            pairs = [(p, g) for p, g in zip(params, grads, strict=False) if p.requires_grad]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])


def _by_layer(tasks: Sequence[WeightGradTask]) -> list[list[WeightGradTask]]:
    """The tasks of each layer, the last layer first."""
    by_layer: dict[tuple[int, ...], list[WeightGradTask]] = {}
    for task in tasks:
        layer, params = task[:2]
        by_layer.setdefault((id(layer), *map(id, params)), []).append(task)
    return list(by_layer.values())[::-1]


def _batched(parts: list[WeightGradTask]) -> list[WeightGradTask]:
    """The tasks of one layer, of several micro-batches, as one task where the layer allows it."""
    layer, params = parts[0][:2]
    if len(parts) == 1 or not layer.batches:
        return parts
    rows = [
        (x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])) for _, _, x, grad in parts
    ]
    return [(layer, params, torch.cat([x for x, _ in rows]), torch.cat([grad for _, grad in rows]))]


class WeightGradStore:
    """The weight gradients of one stage: inside `collect` they are stored for later.

    `main_grads`: the accumulators, by the id of the parameter. Source: Qi et al., Zero Bubble
    (arXiv 2401.10241), section 2.
    """

    def __init__(
        self,
        products: Products | None = None,
        main_grads: Mapping[int, GradAccumulator] | None = None,
    ) -> None:
        self.products = Products() if products is None else products
        self.open: WeightGradTasks | None = None
        self.main_grads: Mapping[int, GradAccumulator] = {} if main_grads is None else main_grads

    @contextmanager
    def collect(self) -> Iterator[WeightGradTasks]:
        """A backward inside leaves its weight gradients in what this yields."""
        self.open = WeightGradTasks(self)
        try:
            yield self.open
        finally:
            self.open = None

    def accumulate(self, layer: _WeightLayer, params: Params, x: Tensor, grad: Tensor) -> bool:
        """Add a layer's weight gradients to their main_grads, from its input `x` [..., in] and its
        output's gradient [..., out].

        False, and nothing done, where a parameter has none of the gradient's dtype. To be called
        where torch records no gradients, as in a backward.
        """
        main_grads = []
        for param in params:
            main_grad = self.main_grads.get(id(param))
            if main_grad is None or main_grad.dtype != grad.dtype:
                return False
            main_grads.append(main_grad)
        layer.accumulate(params, (x, grad), main_grads)
        return True

    def adds_quicker(self, weight: Tensor) -> bool:
        """Whether a layer adds the gradient of this weight [...] quicker than autograd does."""
        main_grad = self.main_grads.get(id(weight))
        if main_grad is None or main_grad.dtype != weight.dtype:
            return False
        if weight.device.type != "cpu":
            return True
        return self.products.paths.beyond("added_gradient_numel", weight.numel(), FEWEST_ADDED - 1)

    def install(self, modules: Iterable[nn.Module], *, quicker_only: bool = False) -> int:
        """Let the layers that can be deferred run through here; the result is their number.

        With `quicker_only` they do so only where `products` multiply quicker, or where a gradient
        is added quicker. No backward can be split then.
        """
        num = 0
        for module in modules:
            layer = _weight_layer(module, self.products)
            if layer is not None and (layer.by_products or not quicker_only):
                give_forward(module, _forward(layer, self, quicker_only))
                num += 1
        return num


class _WeightLayer:
    """A layer that is a product with a weight: its forward, its input's gradient, its weights'
    gradients.

    `batches`: rows of several inputs may be laid under each other. `by_products`: `products`
    multiply.
    """

    batches = True
    by_products = True

    def __init__(self, module: nn.Module, products: Products) -> None:
        self.module: Any = module
        self.products = products

    def is_faster(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `products` multiply quicker than the layer itself would."""
        return self.products.is_faster(x, weight.shape[0])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.products.linear(x, weight, bias)

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self.products.product(grad, weight)

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the weight's gradient."""
        return grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])

    def weight_grads(self, params: Params, x: Tensor, grad: Tensor) -> list[Tensor]:
        """A gradient for each of `params`: the weight, and the bias if there is one."""
        grads = [self.products.weight_grad(*self.factors(x, grad))]
        if len(params) > 1:
            grads.append(grad.reshape(-1, grad.shape[-1]).sum(0))
        return grads

    def accumulate(
        self, params: Params, tasks: tuple[Tensor, Tensor], main_grads: Sequence[GradAccumulator]
    ) -> None:
        """Add what `weight_grads` gives to a main_grad each."""
        x, grad = tasks
        factors = self.factors(x, grad)
        summed = self.products.summed(*factors)
        if summed is None:
            main_grads[0].add_product(*factors)
        else:
            main_grads[0].add(summed)
        if len(params) > 1:
            main_grads[1].add(grad.reshape(-1, grad.shape[-1]).sum(0))


class _TransposedLinear(_WeightLayer):
    """`x @ weight + bias`, as Hugging Face's GPT-2 has it."""

    def is_faster(self, x: Tensor, weight: Tensor) -> bool:
        return self.products.is_faster(x, weight.shape[1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.products.linear(x, weight.t(), bias)

    def input_grad(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self.products.product(grad, weight.t())

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(-1, x.shape[-1]).t(), grad.reshape(-1, grad.shape[-1])


class _ConvolutionLayer(_WeightLayer):
    batches = False
    by_products = False

    def _backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, mask: list[bool]
    ) -> tuple[Tensor, ...]:
        conv = self.module
        bias_sizes = None if conv.bias is None else [conv.out_channels]
        # The gradient of a weight asks for its shape alone, and ZeRO-3 may have freed its numbers.
        shaped = weight if mask[0] else torch.empty_like(weight)
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad,
            x,
            shaped,
            bias_sizes,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.stride),
            conv.groups,
            mask,
        )
        return gradients

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

    def accumulate(
        self, params: Params, tasks: tuple[Tensor, Tensor], main_grads: Sequence[GradAccumulator]
    ) -> None:
        for main_grad, made in zip(main_grads, self.weight_grads(params, *tasks), strict=True):
            main_grad.add(made)


def _weight_layer(module: nn.Module, products: Products) -> _WeightLayer | None:
    """The module as a product with its weight.

    None where it is no such product, or has a forward that is not torch's.
    """
    if "forward" in vars(module):
        return None
    own = type(module).forward
    if own is nn.Linear.forward:
        return _WeightLayer(module, products)
    if (
        own in (nn.Conv1d.forward, nn.Conv2d.forward)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return _ConvolutionLayer(module, products)
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return _TransposedLinear(module, products)
    return None


def _forward(
    layer: _WeightLayer, store: WeightGradStore, quicker_only: bool
) -> Callable[..., Tensor]:
    """The forward of a layer as `_SplitBackward`, with the argument's own name.

    With `quicker_only` the layer's own forward stays where nothing would be gained. It stays in
    graphs of torch's compiler too, whose products are torch's.
    """
    module = layer.module
    original = layer.module.forward
    name = next(iter(inspect.signature(original).parameters), "")

    @functools.wraps(original)
    def forward(*args: Tensor, **named: Tensor) -> Tensor:
        if len(args) + len(named) != 1 or (named and name not in named):
            refused: Tensor = original(*args, **named)  # its error names the arguments
            return refused
        x = args[0] if args else named[name]
        if quicker_only:
            # A read of a computed weight may change state.
            if torch.compiler.is_compiling() or is_parametrized(module):
                computed: Tensor = original(x)
                return computed
            weight = module.weight
            gains = layer.is_faster(x, weight) or store.adds_quicker(weight)
            if not gains or has_function_transforms():
                plain: Tensor = original(x)
                return plain
        output: Tensor = _SplitBackward.apply(x, module.weight, module.bias, (layer, store))
        return output

    return forward


class _SplitBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer_and_store: tuple[_WeightLayer, WeightGradStore],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Kept, because a module may have other parameters by the time of its backward.
        params = (weight,) if bias is None else (weight, bias)
        ctx.layer_and_store = (*layer_and_store, params)
        output = layer_and_store[0].forward(x, weight, bias)
        # Autograd refuses writes into views that a function returns; a model may do `y += bias`.
        return output.data if output._is_view() else output

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer_and_store: tuple[_WeightLayer, WeightGradStore, Params] = ctx.layer_and_store
        layer, store, params = layer_and_store
        # The heads of an attention give a transposed gradient. Two products and a sum read it here,
        # and each of them would make a copy.
        grad = grads[0].contiguous() if layer.by_products else grads[0]
        needed = ctx.needs_input_grad[1 : 1 + len(params)]
        input_grad = layer.input_grad(x, weight, grad) if ctx.needs_input_grad[0] else None
        if not any(needed):
            return input_grad, None, None, None
        # Hooks run in autograd alone, and what computed a weight is freed by this backward.
        waits = all(param.is_leaf and not param._backward_hooks for param in params)
        if store.open is not None and waits:
            store.open.add(layer, params, x, grad)
            return input_grad, None, None, None
        if all(needed) and waits and store.accumulate(layer, params, x, grad):
            return input_grad, None, None, None
        weight_grad, *bias_grads = layer.weight_grads(params, x, grad)
        bias_grad = bias_grads[0] if bias_grads else None
        return input_grad, weight_grad, bias_grad, None
