"""Buffers of a sparse layout, such as the alignment heads of a Whisper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from plait.plan import Plan
from tests.helpers.threaded import threaded

EYE = torch.eye(4)
LAYOUTS = [torch.sparse_coo, torch.sparse_csr]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:rank 1 brought other initial values:UserWarning"),
]


class Mixing(nn.Module):
    """Layers with a sparse buffer, which the forward may multiply by."""

    def __init__(self, mixed: Tensor, *, reads: bool = True, persistent: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("mixed", mixed, persistent=persistent)
        self.reads = reads
        for param in self.parameters():
            nn.init.constant_(param, 0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.reads:
            inputs = (self.mixed @ inputs.T).T
        out: Tensor = self.layers(inputs)
        return out


def trained(
    world: World | None, plan: str, layout: torch.layout, *, reads: bool
) -> tuple[list[float], Tensor]:
    of_the_first = world is None or world.rank == 0
    mixed = (EYE * 2 if of_the_first else EYE.flip(0)).to_sparse(layout=layout)
    model = Mixing(mixed, reads=reads)
    engine = plait.build(
        model,
        f"{plan} precision:float64",
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    batches = [(torch.arange(16.0).view(4, 4) / 16, torch.ones(4, 4))] * 3
    losses = [engine.step(batch).loss for batch in engine.prepare(batches)]
    assert engine.memory()["buffers"] > 0
    return losses, model.mixed.to_dense()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3", "tp2", "pp2:1f1b mb2"])
def test_a_sparse_buffer_is_that_of_the_first_rank(plan: str, layout: torch.layout) -> None:
    reads = "pp" not in plan

    def on(world: World) -> Any:
        return trained(world, plan, layout, reads=reads)

    expected, _ = trained(None, "dp1", layout, reads=reads)
    for losses, mixed in threaded(Plan.parse(plan).world_size, on, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert torch.equal(mixed, (EYE * 2).to(mixed.dtype))


def test_a_sparse_buffer_of_the_checkpoint_is_refused() -> None:
    model = Mixing(EYE.to_sparse(), persistent=True)
    with pytest.raises(ModelError, match=r"'mixed' is sparse_coo, .* persistent=False"):
        plait.build(model, "dp1", loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
