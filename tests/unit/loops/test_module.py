"""An engine as a module and an optimizer: what a plain loop does to them has its usual meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import DataError, ModelError, PlanError
from plait.loops.calls import LossCalls, calls_of
from plait.loops.module import EngineModule, EngineOptimizer, make_module


@pytest.fixture(autouse=True)
def end_of_world() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 8, 4, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randn(6, 8, 3, generator=generator).double(), strict=True))


def under(plan: str, more: Any = lambda: False) -> tuple[EngineModule, EngineOptimizer]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return make_module(LossCalls(model, F.mse_loss), optimizer, plan, more=more)


class Plain(nn.Module):
    """A model on one device that gives its loss, as a prepared one does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        outputs = self.net(x)
        return {"loss": F.mse_loss(outputs, y), "logits": outputs}


def loop(model: Any, optimizer: Any, told: dict[str, bool]) -> list[float]:
    """Steps of two batches, with a rate that falls, clipping and a scaled loss."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    results = []
    for index, (x, y) in enumerate(batches()):
        last = index % 2 == 1
        told["more"] = not last
        loss = model(x, y)["loss"]
        (3.0 * loss / 2).backward()
        results.append(loss.item())
        if last:
            results.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        outputs = model(*batches()[0])
        model.train()
    return [*results, float(outputs["loss"]), *outputs["logits"].flatten().tolist()]


@pytest.mark.parametrize("plan", ["dp1 precision:float64", "mb2 precision:float64"])
def test_accumulating_scaling_clipping_and_rates_are_those_of_a_plain_loop(plan: str) -> None:
    plain = Plain()
    wanted = loop(plain, torch.optim.Adam(plain.parameters(), lr=0.1), {})
    told = {"more": False}
    found = loop(*under(plan, lambda: told["more"]), told)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_a_forward_without_backward_and_zeroed_gradients_leave_no_trace() -> None:
    model, optimizer = under("dp1 precision:float64")
    (x, y), other = batches()[:2]
    first = model(x, y).loss.item()
    model(*other)  # nobody asks for its backward
    model(*other).loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    assert model(x, y).loss.item() == first


def test_a_second_backward_without_a_word_on_accumulating_is_refused() -> None:
    model, _ = under("dp1 precision:float64")
    model(*batches()[0]).loss.backward()
    with pytest.raises(ModelError, match="say that gradients accumulate"):
        model(*batches()[1])


def test_a_loss_of_routers_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.loops.five_loops import MOE

    config = transformers.MixtralConfig(**MOE)
    calls_of(transformers.MixtralForCausalLM(config))
    config.output_router_logits = True
    with pytest.raises(ModelError, match="its loss has a part of all routers' logits"):
        calls_of(transformers.MixtralForCausalLM(config))


def test_what_a_prepared_model_lacks_is_said() -> None:
    model, _ = under("dp1 precision:float64")
    with pytest.raises(ModelError, match="save_pretrained"):
        model.state_dict()
    with pytest.raises(ModelError, match="gives no logits"):
        _ = model(*batches()[0]).logits
    with pytest.raises(DataError, match=r"call model\(inputs, targets\)"):
        model(batches()[0][0])
    with pytest.raises(ModelError, match="give loss=function"):
        calls_of(net())
    with pytest.raises(PlanError, match="updates inside its step"):
        under("pp2:pipedream")
    with pytest.raises(PlanError, match="dp with 'local'"):
        under("dp2:local,every2")
