"""Does an optimizer update each parameter by itself? Found out by trying it.

A stage of a pipeline, a server and an owner of whole tensors update some of the parameters. A norm
over all of them, by which an optimizer clips or finds its rate, would be another number there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.errors import OptimizerError
from plait.parallel.data.elementwise import MakeOptimizer, begin_training, without_graphs
from plait.random_state import drawn_alone

_SHAPE = (4, 6)
_STEPS = 3
_FACTOR = 1e3


def require_apart(make_optimizer: MakeOptimizer, plan_text: str, count: int = 1) -> None:
    """Raise `OptimizerError` where the update of a parameter depends on other parameters.

    `make_optimizer` is tried for three steps on the CPU, on `count` parameters (4, 6). Then some of
    these get larger gradients. One that does not take them, or draws other numbers in each trial,
    is not looked at.
    """
    try:
        name, first = _tried(make_optimizer, count, 1.0)
        _, again = _tried(make_optimizer, count, 1.0)
        _, others = _tried(make_optimizer, count, _FACTOR)
    except Exception:  # a real step says what it is
        return
    if _are_equal(first, again) and not _are_equal(first, others):
        raise OptimizerError(
            f"{name} updates a parameter by the gradients of others, as by a norm over all of "
            f"them, and a rank under {plan_text} updates its own alone. Use dpN:allreduce or ring "
            "without tpN, ppN and epN, or an optimizer without it; to clip by the norm of all "
            "gradients is options=plait.Options(clip_grad_norm=...)"
        )


def _tried(make_optimizer: MakeOptimizer, count: int, factor: float) -> tuple[str, list[Tensor]]:
    """The optimizer's name, and what comes of every other parameter of each group, where the rest
    have gradients times `factor`.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(_SHAPE, generator=generator)) for _ in range(count)]
    with drawn_alone(0):
        optimizer = make_optimizer(params)
        begin_training(optimizer)
        without_graphs(optimizer)
        watched = {
            id(param)
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if (number + index) % 2 == 0
        }
        for _ in range(_STEPS):
            for param in params:
                grad = torch.randn(_SHAPE, generator=generator)
                param.grad = grad if id(param) in watched else factor * grad
            torch_internals.step(optimizer)
    name = type(getattr(optimizer, "inner", optimizer)).__name__
    return name, [one.detach() for one in params if id(one) in watched]


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in pairs)
