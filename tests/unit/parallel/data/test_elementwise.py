from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

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
