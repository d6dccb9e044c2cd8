"""Momentum of parameters whose first gradients come in different steps."""

from __future__ import annotations

import torch

from plait.config import Train
from plait.run.optimizers import from_config


def test_a_parameter_may_get_its_first_gradient_later() -> None:
    """Torch's fused kernel takes the momentum of all its parameters, or of none."""
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    plain = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    fused = from_config(Train(optimizer="sgd", momentum=0.9, lr=0.1, global_batch=1))(mine)
    truth = torch.optim.SGD(plain, lr=0.1, momentum=0.9, foreach=False)
    for step in range(3):
        for params, optimizer in ((mine, fused), (plain, truth)):
            for param in params[: 1 if step == 0 else 2]:
                param.grad = torch.full((3,), float(step + 1))
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other)
