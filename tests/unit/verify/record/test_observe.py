from __future__ import annotations

import pytest
import torch

from plait.errors import ModelError
from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.verify.record.observation import whole
from plait.verify.record.observe import RankRecord, RankStep, join


def part(values, start=0, shape=(2, 3), name="w"):
    value = torch.tensor(values, dtype=torch.float64)
    return Shard(name, shape, Box.whole(shape), start, start + len(values), value)


WHOLE = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def record(grads, params, replicas=(), loss=1.0, start=None):
    return RankRecord(start or params, [RankStep(loss, 2.0, 7, grads, params, list(replicas))])


def test_shards_become_one_tensor_and_remember_whose_they_are():
    ranks = [
        record([part(WHOLE[:4])], [part(WHOLE[:4])]),
        record([part(WHOLE[4:], 4)], [part(WHOLE[4:], 4)]),
    ]
    step = join(ranks).steps[0]
    assert step.params["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert step.shards == [{"w": (0, 4)}, {"w": (4, 6)}]
    assert step.ranks == {} and step.count == 7


def test_equal_copies_are_kept_once():
    step = join([record([part(WHOLE)], [part(WHOLE)])] * 2).steps[0]
    assert step.ranks == {} and step.shards == []


def test_copies_that_differ_are_all_kept():
    odd = [*WHOLE[:5], 9.0]
    step = join([record([part(WHOLE)], [part(WHOLE)]), record([part(odd)], [part(WHOLE)])]).steps[0]
    assert {rank: view.grads["w"].flatten().tolist() for rank, view in step.ranks.items()} == {
        0: WHOLE,
        1: odd,
    }
    assert all(not view.params for view in step.ranks.values())


def test_what_the_next_forward_uses_is_held_against_the_owner():
    stale = [*WHOLE[:4], 0.0, 0.0]
    ranks = [
        record([part(WHOLE[:4])], [part(WHOLE[:4])], [part(stale)]),
        record([part(WHOLE[4:], 4)], [part(WHOLE[4:], 4)], [part(WHOLE)]),
    ]
    step = join(ranks).steps[0]
    assert step.ranks[0].params["w"].flatten().tolist() == stale


def test_elements_that_no_rank_holds_are_nan():
    step = join([record([part(WHOLE[:4])], [part(WHOLE[:4])])]).steps[0]
    assert bool(step.params["w"].isnan().any())


def test_a_loss_on_which_ranks_disagree_is_not_hidden():
    ranks = [record([part(WHOLE)], [part(WHOLE)], loss=loss) for loss in (1.0, 1.0, 3.0)]
    assert join(ranks).steps[0].loss == 3.0


def test_a_start_on_which_ranks_disagree_is_not_hidden():
    odd = [9.0, *WHOLE[1:]]
    ranks = [record([part(WHOLE)], [part(WHOLE)], start=[part(start)]) for start in (WHOLE, odd)]
    assert join(ranks).start["w"].flatten().tolist() == pytest.approx(odd)


def test_a_tensor_without_memory_is_refused_before_it_is_read():
    released = torch.ones(4)
    released.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match=r"shape \(4,\) has no memory"):
        whole(released)
    assert whole(torch.ones(0)).numel() == 0
