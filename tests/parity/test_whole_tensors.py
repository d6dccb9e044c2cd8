"""Optimizers of other packages that need whole tensors: SOAP and Shampoo, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.config import Train
from plait.models.parameters import Parameters
from plait.plan import Plan
from tests.parity.test_optimizers import EVEN, check, plainly, trained

Run = Callable[..., list[Any]]
PLANS = [
    *("dp1", "dp2", "dp2:zero1", "dp3:zero2 mb2", "dp2:zero3", "dp4:zero3,replicate2"),
    *("tp2", "tp2 dp2:zero1", "tp2 dp2:zero2", "tp4:2d", "tp8:3d", "cp2 dp2:zero1"),
    *("pp2:1f1b mb2", "pp2 dp2:zero3", "tp2 dp2:zero3 pp2:1f1b mb2", "tp2 dp2:zero1 pp2 mb2"),
]


def make_soap(params: Parameters) -> torch.optim.Optimizer:
    """SOAP with a factor for the shorter side of the MLPs' matrices, and Adam on the rest.

    A first gradient of lower rank than a factor leaves its basis to rounding, on one device too.
    """
    package = pytest.importorskip("pytorch_optimizer", reason="SOAP is pytorch_optimizer's")
    named = params.named()
    plain = [param for name, param in named if "mlp" not in name]
    others = [param for name, param in named if "mlp" in name]
    groups = [{"params": plain, "max_precondition_dim": 1}, {"params": others}]
    made: torch.optim.Optimizer = package.SOAP(
        [group for group in groups if group["params"]],
        lr=0.02,
        eps=1e-3,
        max_precondition_dim=24,
        precondition_frequency=1,
    )
    return made


def make_shampoo(params: Parameters) -> torch.optim.Optimizer:
    package = pytest.importorskip("pytorch_optimizer", reason="Shampoo is pytorch_optimizer's")
    made: torch.optim.Optimizer = package.Shampoo(
        params, lr=0.02, momentum=0.9, matrix_eps=1e-3, weight_decay=0.01
    )
    return made


soap = plait.WholeTensors(make_soap)
shampoo = plait.WholeTensors(make_shampoo)
MAKERS = {"soap": make_soap, "shampoo": make_shampoo}


def config(name: str) -> Train:
    return Train(optimizer=f"{__name__}:{name}")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MAKERS)
def test_it_equals_one_device(ranks: Run, name: str, plan: str) -> None:
    pytest.importorskip("pytorch_optimizer", reason=f"{name} is pytorch_optimizer's")
    size = Plan.parse(plan).world_size
    found = ranks(size, trained, plan, config(name), EVEN, plan=plan)
    check(found, plainly(lambda params: [MAKERS[name](Parameters(list(params.items())))], EVEN))
