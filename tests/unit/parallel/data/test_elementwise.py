from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import OptimizerError
from plait.parallel.data import require_elementwise

ELEMENTWISE = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw for graphs": lambda params: torch.optim.AdamW(params, lr=0.1, capturable=True),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_accepts(name: str, keep_dims: bool) -> None:
    require_elementwise(ELEMENTWISE[name], "dp2:zero1", keep_dims=keep_dims)


class ByColumn(torch.optim.SGD):
    """A user's optimizer that looks at the norm of each column."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(dim=0), alpha=group["lr"])


class NormScaled(torch.optim.SGD):
    """A user's optimizer that looks at the norm of the whole tensor."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Seldom(torch.optim.SGD):
    """Divides by the norm of a tensor, where a subclass says so."""

    seen = 0
    largest = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                self.largest = max(self.largest, float(param.grad.norm()))
                size = param.grad.norm() if self.looks(param) else 1.0
                param.sub_(param.grad / size, alpha=group["lr"])

    def looks(self, param: Tensor) -> bool:
        raise NotImplementedError


class ForLarge(Seldom):
    """As AdafactorBigVision factors dims of 16 and more."""

    def looks(self, param: Tensor) -> bool:
        return param.dim() > 1 and min(param.shape) >= 16


class ForKernels(Seldom):
    """As gradients are centralised for convolutions alone."""

    def looks(self, param: Tensor) -> bool:
        return param.dim() > 3


class Late(Seldom):
    """As AdaShift begins after ten steps."""

    def looks(self, param: Tensor) -> bool:
        return self.seen > 10


class WhereSmaller(Seldom):
    """As AdaNorm acts where the norm of gradients falls."""

    def looks(self, param: Tensor) -> bool:
        assert param.grad is not None
        return float(param.grad.norm()) < 0.3 * self.largest


MATRIX = (32, 24)
KERNEL = (8, 4, 3, 3)
SELDOM: dict[str, tuple[Any, tuple[int, ...]]] = {
    "large matrices": (ForLarge, MATRIX),
    "kernels": (ForKernels, KERNEL),
    "late": (Late, MATRIX),
    "smaller gradients": (WhereSmaller, MATRIX),
    "a small rate": (NormScaled, MATRIX),
}


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("name", SELDOM)
def test_refuses_what_looks_at_whole_tensors_seldom(name: str, keep_dims: bool) -> None:
    kind, shape = SELDOM[name]
    lr = 1e-9 if name == "a small rate" else 0.1
    with pytest.raises(OptimizerError, match="is not elementwise"):
        require_elementwise(partial(kind, lr=lr), "dp2:zero1", [(3,), shape], keep_dims=keep_dims)


@pytest.mark.parametrize("keep_dims", [False, True])
def test_shapes_that_a_model_has_not_do_not_matter(keep_dims: bool) -> None:
    small = [(), (1,), (7,), (2, 2), (8, 1, 3, 3), (12, 8), (600, 1)]
    pairs: list[tuple[Any, list[tuple[int, ...]]]] = [
        (ForLarge, small),
        (ForKernels, [(3,), MATRIX]),
    ]
    for kind, shapes in pairs:
        require_elementwise(partial(kind, lr=0.1), "dp2:zero1", shapes, keep_dims=keep_dims)


def test_an_optimizer_of_single_precision_is_tried_in_it() -> None:
    class Single(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            if self.param_groups[0]["params"][0].dtype != torch.float32:
                raise TypeError("float32 alone")

    require_elementwise(Single, "dp2:zero1", [MATRIX])


def test_an_optimizer_that_takes_none_is_named() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise TypeError("float16 alone")

    with pytest.raises(OptimizerError, match="Half does not take them: float16 alone"):
        require_elementwise(partial(Half, lr=0.1), "dp2:zero1", [MATRIX])


def lbfgs(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: NormScaled(params, lr=0.1),
        lambda params: ByColumn(params, lr=0.1),
        lambda params: torch.optim.Muon(params, lr=0.1),
        lambda params: torch.optim.Adafactor(params, lr=0.1),
    ],
)
def test_refuses_what_looks_at_whole_tensors(make: object, keep_dims: bool) -> None:
    with pytest.raises(
        OptimizerError, match=r"dp2:zero1 updates shards.*elementwise.*dpN:allreduce"
    ):
        require_elementwise(make, "dp2:zero1", keep_dims=keep_dims)  # type: ignore[arg-type]


def test_an_optimizer_that_needs_a_closure_has_another_cure() -> None:
    """No plan takes it, so that none is named."""
    with pytest.raises(OptimizerError, match=r"LBFGS.step\(closure\) .* such as AdamW$"):
        require_elementwise(lbfgs, "dp2:zero1")


def hooked(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's SGD with a hook that divides by the norm of a tensor, from the fifth step on."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    seen = 0

    def divide(stepped: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        nonlocal seen
        seen += 1
        for param in params:
            if param.grad is not None and seen > 4:
                param.grad /= param.grad.norm()

    optimizer.register_step_pre_hook(divide)
    return optimizer


def test_torchs_own_optimizers_have_one_trial() -> None:
    made: list[torch.optim.Optimizer] = []

    def counted(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=0.1))
        return made[-1]

    require_elementwise(counted, "dp2:zero1")
    assert len(made) == 3  # of a whole tensor, and of its two parts


def test_a_hook_makes_an_optimizer_another_one() -> None:
    with pytest.raises(OptimizerError, match="SGD is not elementwise"):
        require_elementwise(hooked, "dp2:zero1")


class WithoutAsking(torch.optim.SGD):
    """A user's optimizer that takes each parameter's gradient for granted."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("keep_dims", [False, True])
def test_gradients_may_be_taken_for_granted(keep_dims: bool) -> None:
    shapes = [(), MATRIX, MATRIX, (3,)]
    require_elementwise(partial(WithoutAsking, lr=0.1), "dp2:zero1", shapes, keep_dims=keep_dims)


def test_a_compiled_step_is_not_compiled_for_the_trial() -> None:
    compiled: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def update(param: Tensor, grad: Tensor) -> Tensor:
        return param - 0.1 * grad

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.copy_(update(param, param.grad))

    require_elementwise(partial(Compiled, lr=0.1), "dp2:zero1", [MATRIX, KERNEL])
    assert not compiled


class BreaksDown(torch.optim.SGD):
    """Divides by what its rate leaves, which is nothing at a rate of one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad.clamp(min=0) / (1.0 - group["lr"]))


def test_an_optimizer_that_breaks_down_everywhere_alike_is_taken() -> None:
    require_elementwise(lambda params: BreaksDown(params, lr=0.1), "dp2:zero1")
