"""`linear_product` holds for every plan: by rule large float32 products are oneDNN's, by torch none
is; steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy
from plait.plan import Plan
from plait.products import operations

KEYS = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 64,
}
SAMPLES = 16
LENGTH = 64
PLANS = (
    "dp1",
    "dp1 remat:selective",
    "dp2:zero3",
    "tp2",
    "tp2:1d,sp",
    "tp4:2d",
    "tp8:2.5d,depth2",
    "tp8:3d",
    "pp2",
)


class Seen(TorchDispatchMode):
    """Whether oneDNN has multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.onednn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.onednn |= func in operations()
        return func(*args, **(kwargs or {}))


def step(world: World, text: str, linear_product: str) -> tuple[float, float, bool]:
    """Loss and norm of the gradient in float32, and who multiplied."""
    with torch.device("meta"):
        model = models.make("gpt", max_position_embeddings=LENGTH, **KEYS)
    options = Options(linear_product=linear_product, clip_grad_norm=1e9)
    engine = build(
        model,
        text,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        options=options,
        world=world,
    )
    tokens = torch.randint(0, 64, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(Plan.parse(text).dp.size)[world.worker[0]]
    with Seen() as seen:
        result = engine.step((own[:, :-1], own[:, 1:]))
    assert result.grad_norm is not None
    return result.loss, result.grad_norm, seen.onednn


@pytest.mark.parametrize("text", PLANS)
def test_every_plan_multiplies_as_it_is_told(ranks: Callable[..., list[Any]], text: str) -> None:
    size = Plan.parse(text).world_size
    by_rule, by_torch = (ranks(size, step, text, how, plan=text) for how in ("rule", "torch"))
    assert [seen for *_, seen in by_rule] == [bool(operations())] * size
    assert not any(seen for *_, seen in by_torch)
    for one, other in zip(by_rule, by_torch, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-5)
