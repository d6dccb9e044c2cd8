"""More messages than a mailbox holds, sent by both sides before either receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NUM = 100


def exchange(world: Any, posts_first: bool) -> float:
    axis = world.axis("dp")
    other = 1 - axis.rank
    arrived = [torch.zeros(1) for _ in range(NUM)]
    receives = [axis.receive(tensor, other) for tensor in arrived if posts_first]
    sends = [axis.send(torch.tensor([float(number)]), other) for number in range(NUM)]
    receives += [axis.receive(tensor, other) for tensor in arrived if not posts_first]
    for work in (*receives, *sends):
        work.wait()
    return float(sum(tensor.sum() for tensor in arrived))


@pytest.mark.parametrize("posts_first", [True, False])
@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_full_mailboxes_do_not_wait_for_each_other(ranks, backend, posts_first):
    """A rank that is ahead sends to one that has posted no receive for it yet."""
    found = ranks(2, exchange, posts_first, plan="dp2", backend=backend, group_timeout_seconds=10.0)
    assert found == [NUM * (NUM - 1) / 2] * 2
