from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from plait.mesh import Shard
from plait.mesh.boxes import Box

FUSED = (2, 6)
VIEW = (2, 3, 2)
"""Three parts of two columns side by side, of which a rank has the second column each."""


def fused(start: int, stop: int, values: Tensor) -> Shard:
    return Shard("w", FUSED, Box((0, 0, 1), (2, 3, 1)), start, stop, values, VIEW)


def write(shard: Shard, whole: Tensor) -> None:
    rectangle = whole.view(FUSED)[shard.box.within(Box.whole(FUSED))]
    shard.values.copy_(rectangle.reshape(-1)[shard.start : shard.stop])


def test_the_index_and_the_boxes_of_a_fused_tensor_name_the_same_elements() -> None:
    whole = torch.arange(12.0)
    for start in range(7):
        for stop in range(start, 7):
            place = fused(start, stop, torch.zeros(stop - start))
            expected = whole[place.index()]
            place.fill(partial(write, whole=whole))
            assert torch.equal(place.values, expected), (start, stop)
            held = torch.zeros(12)
            for box in place.boxed():
                assert box.view is None
                held.view(FUSED)[box.box.within(Box.whole(FUSED))] = box.values.view(box.box.extent)
            assert torch.equal(held[place.index()], expected)
            assert held.sum() == expected.sum()


def test_shares_part_a_shard() -> None:
    place = fused(1, 6, torch.arange(5.0))
    shares = [place.share(index, 3) for index in range(3)]
    assert [(share.start, share.stop) for share in shares] == [(1, 2), (2, 4), (4, 6)]
    assert torch.equal(torch.cat([share.values for share in shares]), place.values)


def test_another_tensor_of_a_place_shares_its_memory() -> None:
    moment = torch.zeros(2, 3)
    kept = Shard.whole("w", torch.ones(2, 3)).like("optimizer/exp_avg/w", moment)
    kept.values[4] = 7.0
    assert kept.name == "optimizer/exp_avg/w"
    assert kept.global_shape == (2, 3)
    assert moment[1, 1] == 7.0
