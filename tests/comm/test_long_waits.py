"""A rank that waits for long says for whom, over Gloo as over shared memory."""

from __future__ import annotations

import time

import torch

from plait.doctor import pulse
from plait.mesh import Mesh


def _late(world):
    said = []
    pulse.NOTICE_SECONDS = 0.5
    pulse.say, before = said.append, pulse.say
    try:
        axis = world.axis("dp")
        axis.barrier()
        if axis.rank == 1:
            time.sleep(1.5)
        axis.all_reduce(torch.ones(4)).wait()
    finally:
        pulse.NOTICE_SECONDS = 5.0
        pulse.say = before
    return said


def test_a_rank_that_waits_for_long_over_gloo_says_for_whom(ranks):
    said = ranks(2, _late, plan=Mesh(dp=2), backend="gloo")
    assert len(said[0]) == 1, said
    assert said[0][0].startswith("rank 0 has been waiting for rank 1 for ")
    assert said[0][0].endswith("(all_reduce on axis dp)")
    assert said[1] == []
