"""The passes: where transfers, gathers, reductions and updates stand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.parallel.pipeline.actions import COMPUTE, Action, Kind
from plait.parallel.pipeline.lower import (
    add_reduce,
    add_send_recv,
    add_unshard,
    add_update,
    group_weight_grads,
    joined_weight_grads,
    lower,
    strip,
)
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import peak_activations
from plait.parallel.pipeline.verify import verify


def words(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def schedule(name: str, p: int, m: int, **more: int):  # type: ignore[no-untyped-def]
    return make(
        name,
        p,
        max(m, SCHEDULES[name].facts.least_micro_batches(p)),
        2 if name == "interleaved" else 1,
        **more,
    )


names = st.sampled_from(sorted(SCHEDULES))


@settings(max_examples=40, deadline=None)
@given(names, st.integers(1, 5), st.integers(1, 9))
def test_lowering_only_inserts(name: str, p: int, m: int) -> None:
    plain = schedule(name, p, m)
    assert strip(lower(plain)) == add_update(plain)
    assert [[a for a in actions if a.kind in COMPUTE] for actions in lower(plain).ranks] == [
        [a for a in actions if a.kind in COMPUTE] for actions in plain.ranks
    ]


@settings(max_examples=40, deadline=None)
@given(names, st.integers(1, 5), st.integers(1, 9))
def test_reduce_is_armed_right_before_the_last_weight_gradient_of_each_update(
    name: str, p: int, m: int
) -> None:
    for actions in add_reduce(add_update(schedule(name, p, m))).ranks:
        assert sum(a.kind is Kind.REDUCE for a in actions) == sum(
            a.kind is Kind.UPDATE for a in actions
        )
        for index, action in enumerate(actions):
            if action.kind is Kind.REDUCE:
                mine = [a for a in actions[index + 1 :] if a.stage == action.stage]
                stop = mine.index(Action(Kind.UPDATE, action.stage))
                gradients = [a for a in mine[:stop] if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
                assert len(gradients) == 1
                assert gradients[0] == actions[index + 1]


def test_updates_of_a_flush_stand_together_at_the_end() -> None:
    for rank in lower(make("zbv", 3, 6)).ranks:
        assert [a.kind for a in rank[-2:]] == [Kind.UPDATE, Kind.UPDATE]
        assert rank[-2].stage < rank[-1].stage


def test_a_send_follows_its_computing_at_once_and_neighbours_on_one_rank_send_nothing() -> None:
    lowered = add_send_recv(make("zbv", 2, 4))
    assert not any(
        a.kind in (Kind.SEND_F, Kind.RECV_B) and a.stage == 1 for a in lowered.ranks[1]
    )  # stages 1 and 2: rank 1
    for actions in lowered.ranks:
        for before, action in pairwise(actions):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                assert (before.stage, before.micro_batch) == (action.stage, action.micro_batch)
                assert before.kind in COMPUTE


def test_receives_are_posted_before_the_computing_that_they_can_overlap() -> None:
    assert words(lower(make("gpipe", 2, 3)).ranks[1]).startswith(
        "1UNSHARD 1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1"
    )


def test_unshard_keeps_at_most_so_many_stages_and_drops_the_one_used_last() -> None:
    lowered = add_unshard(make("interleaved", 2, 4, 3), max_unsharded=2)
    for actions in lowered.ranks:
        whole: set[int] = set()
        for action in actions:
            if action.kind is Kind.UNSHARD:
                assert action.stage not in whole
                whole.add(action.stage)
            elif action.kind is Kind.RESHARD:
                whole.remove(action.stage)
            else:
                assert action.stage in whole
            assert len(whole) <= 2
    assert not any(a.kind is Kind.RESHARD for a in add_unshard(make("interleaved", 2, 4, 3)))


def test_updated_weights_are_gathered_again_before_they_are_used() -> None:
    assert (
        words(lower(make("pipedream", 1, 2)).ranks[0])
        == "0UNSHARD 0F0 0REDUCE 0B0 0U 0UNSHARD 0F1 0REDUCE 0B1 0U"
    )


@pytest.mark.parametrize("name", ["naive", "1f1b", "gpipe"])
def test_lowering_twice_changes_nothing_but_transfers(name: str) -> None:
    assert strip(lower(strip(lower(make(name, 3, 4))))) == strip(lower(make(name, 3, 4)))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["zb-h1", "zb-h2", "zbv", "v-half", "v-min"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(2, 4),
)
def test_grouped_weight_gradients_stand_together_and_nothing_else_moves(
    name: str, p: int, m: int, size: int
) -> None:
    plain = schedule(name, p, m)
    grouped = group_weight_grads(plain, size)
    verify(grouped)
    for before, after in zip(plain.ranks, grouped.ranks, strict=True):
        assert [a for a in before if a.kind is not Kind.WEIGHT_GRAD] == [
            a for a in after if a.kind is not Kind.WEIGHT_GRAD
        ]
        joined = joined_weight_grads(after)
        for stage in {a.stage for a in after}:
            own = [a for a in after if a.stage == stage and a.kind is Kind.WEIGHT_GRAD]
            assert own == [a for a in before if a.stage == stage and a.kind is Kind.WEIGHT_GRAD]
            alone = sum(a not in joined for a in own)
            assert alone <= -(-len(own) // size) if own else not alone
    for before, after in zip(peak_activations(plain), peak_activations(grouped), strict=True):
        assert before <= after <= before + size - 1


def test_joined_weight_gradients_are_those_before_another_of_their_stage() -> None:
    actions = tuple(
        map(
            Action.parse,
            ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1", "1W0", "1W1", "1REDUCE", "1W2", "0W2"],
        )
    )
    assert sorted(map(str, joined_weight_grads(actions))) == ["1W0", "1W1"]
    assert group_weight_grads(schedule("zb-h1", 2, 4), 1) == schedule("zb-h1", 2, 4)
