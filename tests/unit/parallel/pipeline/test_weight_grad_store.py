"""Weight gradients later, and into sinks: what a layer adds up is what torch's own backward would
have, to the last ulps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.pipeline.weight_grad_store import WeightGradStore
from plait.paths import Paths
from plait.products import Products, operations


class Adds:
    """A sink that adds into a tensor of its own."""

    def __init__(self, param: Tensor, dtype: torch.dtype | None = None) -> None:
        self.total = torch.zeros_like(param)
        self.dtype = dtype or param.dtype
        self.products = 0

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self.total += left @ right
        self.products += 1

    def add(self, grad: Tensor) -> None:
        assert grad.shape == self.total.shape
        self.total += grad


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), (6, 5)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, padding=1, stride=2), (2, 2, 6, 6)),
    "groups": (lambda: nn.Conv1d(4, 4, 3, groups=2, bias=False), (2, 4, 7)),
}


def made(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A layer, its twin as torch has it, and an input."""
    torch.manual_seed(0)
    layer = LAYERS[name][0]().double()
    shape = LAYERS[name][1]
    twin = LAYERS[name][0]().double()
    twin.load_state_dict(layer.state_dict())
    return layer, twin, torch.randn(shape, dtype=torch.float64)


def passed(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(input with its gradient to come, loss) of a forward."""
    inputs = x.clone().requires_grad_()
    return inputs, module(inputs).square().sum()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sinks_get_what_backward_would_have_made(name: str, split: bool) -> None:
    layer, twin, x = made(name)
    store = WeightGradStore()
    assert store.install([layer]) == 1
    sinks = {id(param): Adds(param) for param in layer.parameters()}
    store.main_grads = sinks
    for _ in range(2):  # two micro-batches
        inputs, loss = passed(layer, x)
        if split:
            with store.collect() as later:
                loss.backward()
            assert inputs.grad is not None
            before = [sink.total.clone() for sink in sinks.values()]
            later.run()
            assert all(
                not torch.equal(a, sink.total)
                for a, sink in zip(before, sinks.values(), strict=True)
            )
        else:
            loss.backward()
        expected, theirs = passed(twin, x)
        theirs.backward()
        torch.testing.assert_close(inputs.grad, expected.grad)
    assert all(param.grad is None for param in layer.parameters())
    for param, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(sinks[id(param)].total, other.grad)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("why", ["no sinks", "another dtype", "one frozen"])
def test_without_fitting_sinks_the_gradients_come_as_torch_has_them(why: str, split: bool) -> None:
    layer, twin, x = made("linear")
    layer.weight.requires_grad_(why != "one frozen")  # type: ignore[union-attr]
    store = WeightGradStore()
    store.install([layer])
    dtype = torch.float32 if why == "another dtype" else None
    sinks: dict[int, Any] = (
        {}
        if why == "no sinks"
        else {id(p): Adds(p, dtype) for p in layer.parameters() if p.requires_grad}
    )
    store.main_grads = sinks
    _, loss = passed(layer, x)
    if split:
        with store.collect() as later:
            loss.backward()
        later.run()
    else:
        loss.backward()
    _, theirs = passed(twin, x)
    theirs.backward()
    for param, other in zip(layer.parameters(), twin.parameters(), strict=True):
        if param.requires_grad:
            torch.testing.assert_close(param.grad, other.grad)
        else:
            assert param.grad is None
    assert all(not sink.total.any() for sink in sinks.values())


def test_a_module_that_computes_otherwise_is_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    wrapped = nn.Linear(2, 2)
    wrapped.forward = lambda x: x  # type: ignore[method-assign]
    reflecting = nn.Conv1d(1, 1, 3, padding=1, padding_mode="reflect")
    assert WeightGradStore().install([Own(2, 2), wrapped, reflecting, nn.LayerNorm(2)]) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_what_two_micro_batches_left_may_be_made_as_one(name: str) -> None:
    layer, twin, x = made(name)
    store = WeightGradStore()
    store.install([layer])
    sinks = {id(param): Adds(param) for param in layer.parameters()}
    store.main_grads = sinks
    left = []
    for scale in (1.0, 0.5):
        with store.collect() as later:
            passed(layer, x * scale)[1].backward()
        left.append(later)
        passed(twin, x * scale)[1].backward()
    left[1].take(left[0])
    left[1].run()
    left[0].run()  # nothing is left there
    assert sinks[id(layer.weight)].products == (0 if "Conv" in type(layer).__name__ else 1)
    for param, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(sinks[id(param)].total, other.grad)


@pytest.mark.parametrize("rows", [7, 512])
def test_only_what_is_quicker_leaves_the_layers_own_forward(rows: int) -> None:
    """Large products go through here and small ones do not; both give torch's gradients, and those
    of gradients.
    """
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    twin = nn.Linear(64, 64)
    twin.load_state_dict(layer.state_dict())
    assert WeightGradStore().install([layer, nn.Conv1d(1, 1, 1)], quicker_only=True) == 1
    found = []
    for module in (layer, twin):
        x = torch.linspace(-1, 1, rows * 64).view(rows, 64).requires_grad_()
        y = module(x)
        (slope,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        slope.square().sum().backward()
        found.append((y, slope, *(param.grad for param in module.parameters())))
    names = [type(y.grad_fn).__name__ for y, *_ in found]
    assert names[1] == "AddmmBackward0" and (names[0] == names[1]) == (
        rows == 7 or not operations()
    )
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    rows_apart = torch.func.vmap(layer)(torch.ones(rows, 512, 64))
    torch.testing.assert_close(rows_apart, twin(torch.ones(rows, 512, 64)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_the_output_may_be_written_into(name: str) -> None:
    layer, twin, x = made(name)
    WeightGradStore().install([layer])
    gradients = []
    for module in (layer, twin):
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        output += output.detach().sin()
        output.square().sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("why", ["large", "small", "other dtype", "no sink"])
def test_a_layer_adds_large_gradients_itself_and_leaves_small_ones_to_autograd(why: str) -> None:
    layer = nn.Linear(8, 8, dtype=torch.float64)
    twin = nn.Linear(8, 8, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    paths = Paths({"added_gradient_numel": 63 if why != "small" else 64})
    dtype = torch.float32 if why == "other dtype" else None
    sinks = {id(param): Adds(param, dtype) for param in layer.parameters()}
    store = WeightGradStore(Products("torch", paths), {} if why == "no sink" else sinks)
    assert store.install([layer], quicker_only=True) == 1
    for module in (layer, twin):
        passed(module, torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8))[1].backward()
    for param, other in zip(layer.parameters(), twin.parameters(), strict=True):
        found = sinks[id(param)].total if why == "large" else param.grad
        torch.testing.assert_close(found, other.grad)
    assert sinks[id(layer.weight)].products == (1 if why == "large" else 0)


def test_a_transposed_gradient_is_laid_out_once() -> None:
    """The heads of an attention give one; the product of the input's gradient gets rows."""
    layer, twin, _ = made("linear")
    seen: list[bool] = []

    class Watched(Products):
        def product(self, x: Tensor, weight: Tensor) -> Tensor:
            seen.append(x.is_contiguous())
            return super().product(x, weight)

    WeightGradStore(Watched("torch")).install([layer])
    gradients = []
    for module in (layer, twin):
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(2, 4, 5).requires_grad_()
        module(x).transpose(1, 2).square().contiguous().sin().sum().backward()
        gradients.append(x.grad)
    assert seen == [True]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("stored", [False, True])
def test_a_hook_of_a_weight_gets_its_gradient(stored: bool) -> None:
    layer = nn.Linear(5, 3).double()
    layer.weight.register_hook(lambda grad: grad / 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    layer(x).square().sum().backward()
    expected = layer.weight.grad
    layer.weight.grad = None
    sink = Adds(layer.weight)
    store = WeightGradStore(main_grads={id(layer.weight): sink, id(layer.bias): Adds(layer.bias)})
    store.install([layer])
    if stored:
        with store.collect() as tasks:
            layer(x).square().sum().backward()
        tasks.run()
    else:
        layer(x).square().sum().backward()
    assert expected is not None and layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-14, atol=0)
    assert sink.products == 0


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_weight_that_is_computed_gets_its_gradient_at_once(norm: str) -> None:
    layer: Any = getattr(nn.utils.parametrizations, norm)(nn.Linear(5, 3)).double().eval()
    x = torch.randn(4, 5, dtype=torch.float64)
    layer(x).square().sum().backward()
    expected = {name: param.grad for name, param in layer.named_parameters()}
    layer.zero_grad()
    store = WeightGradStore()
    store.install([layer])
    with store.collect() as tasks:
        layer(x).square().sum().backward()
    tasks.run()
    for name, param in layer.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-13, atol=1e-15)
