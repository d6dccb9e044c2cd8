"""Each rule of the verifier, broken once; the error shows the grid with the cell marked."""

from __future__ import annotations

import pytest

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Schedule
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.schedules.asynchronous import two_buffered_weights
from plait.parallel.pipeline.verify import verify


def listed(*ranks: str, name: str = "hand", **fields: object) -> Schedule:
    lists = tuple(tuple(Action.parse(word) for word in rank.split()) for rank in ranks)
    micro_batches = 1 + max(action.micro_batch or 0 for actions in lists for action in actions)
    return Schedule(name, tuple(range(len(ranks))), micro_batches, lists, **fields)  # type: ignore[arg-type]


BROKEN = {
    "twice": (listed("0F0 0B0 0F0"), "0F0 happens twice", ">0F0<"),
    "other rank": (
        listed("0F0 1F0 0B0", "1B0"),
        "1F0 is on rank 0; rank 1 holds the stage",
        ">1F0<",
    ),
    "no such stage": (listed("0F0 7F0 0B0"), "of stage 7; there are 1", ">7F0<"),
    "no forward": (listed("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"), "1F1 is missing", "1B1"),
    "no backward": (listed("0F0"), "found nothing", "0F0"),
    "half a backward": (listed("0F0 0I0"), "found I", "0I0"),
    "both backwards": (listed("0F0 0I0 0B0 0W0"), "found B and I and W", "0W0"),
    "order": (listed("0B0 0F0"), "0B0 comes before 0F0", ">0B0<"),
    "weight before input": (listed("0F0 0W0 0I0"), "0W0 comes before 0I0", ">0W0<"),
    "deadlock": (
        listed("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "deadlock: rank 0 waits at 0B0 for 0F0, 1I0, which never comes",
        ">0B0<",
    ),
    "unmatched send": (
        listed("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"),
        "1SEND_B0 is missing",
        "0F0",
    ),
    "stray transfer": (
        listed("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "0SEND_B0 has no counterpart",
        ">0SEND_B0<",
    ),
    "sent too early": (
        listed("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "0SEND_F0 comes before 0F0",
        ">0SEND_F0<",
    ),
    "received too late": (
        listed("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
        "1RECV_F0 comes after 1F0",
        ">1RECV_F0<",
    ),
    "crossed transfers": (
        listed(
            "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        ),
        "deadlock where transfers block: rank 0 is at 0SEND_F1, no rank at 1RECV_F1",
        ">0SEND_F1<",
    ),
    "gradient in no update": (
        listed("0F0 0B0 0U 0F1 0B1"),
        "no update of stage 0 follows 0B1",
        ">0B1<",
    ),
    "update inside": (
        listed("0F0 0F1 0B0 0U 0B1 0U"),
        "an update of stage 0 stands between 0F1 and its backward",
        ">0F1<",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_schedule_is_refused_with_its_cell_marked(case: str) -> None:
    schedule, message, cell = BROKEN[case]
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    assert message in str(error.value)
    assert cell in str(error.value)
    assert "  0 | " in str(error.value)


def test_2bw_needs_as_many_micro_batches_as_ranks_and_the_verifier_finds_out_by_itself() -> None:
    verify(two_buffered_weights(4, 4, 3))
    with pytest.raises(ScheduleError, match="0F4 needs weights 1, of which 0 are made"):
        verify(two_buffered_weights(4, 2, 3))


def test_an_asynchronous_schedule_that_says_it_flushes_is_refused() -> None:
    stream = make("pipedream", 2, 4)
    with pytest.raises(ScheduleError, match="stands between"):
        verify(Schedule("flush?", stream.placement, 4, stream.ranks))


def test_swapping_two_neighbours_of_a_lowered_list_is_right_or_refused_but_never_wrong() -> None:
    good = lower(make("zb-h1", 2, 3))
    refused = 0
    for rank, actions in enumerate(good.ranks):
        for index in range(len(actions) - 1):
            swapped = [*actions[:index], actions[index + 1], actions[index], *actions[index + 2 :]]
            ranks = [swapped if r == rank else list(other) for r, other in enumerate(good.ranks)]
            try:
                verify(good.with_ranks(ranks))
            except ScheduleError:
                refused += 1
    assert refused >= 10
