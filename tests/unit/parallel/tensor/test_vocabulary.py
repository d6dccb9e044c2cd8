"""Cross-entropy on ranges of the vocabulary against torch's, forward and backward, and what no rank
ever holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.comm import World
from plait.models.losses import cross_entropy
from plait.parallel.tensor import vocabulary
from tests.helpers.threaded import threaded


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("group_numel", [1 << 22, 30])
def test_equals_torch(
    size: int, scale: float, group_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "GROUP_NUMEL", group_numel)
    torch.manual_seed(0)
    logits = torch.randn(4, 5, 6 * size, dtype=torch.float64) * scale
    targets = torch.randint(0, 6 * size, (4, 5))
    targets[0, :3] = -100
    whole = logits.clone().requires_grad_()
    total, count = cross_entropy(whole, targets)
    (total / count).backward()

    def rank(world: World) -> Any:
        axis = world.axis("tp")
        own = logits.tensor_split(size, -1)[axis.rank].clone().requires_grad_()
        loss, number = vocabulary.cross_entropy(own, targets, axis, -100)
        (loss / number).backward()
        return loss.detach(), number, own.grad, world.ledger.bytes("tp")

    results = threaded(size, rank, plan=f"tp{size}")
    for loss, number, _, sent in results:
        assert float((loss - total.detach()).abs()) <= 1e-10 * float(total.detach())
        assert number == count
        assert (
            sent == (size - 1) * 3 * targets.numel() * 8
        )  # three numbers a token: far less than the logits
    grad = torch.cat([found[2] for found in results], -1)
    assert float((grad - whole.grad).abs().max()) <= 1e-12
