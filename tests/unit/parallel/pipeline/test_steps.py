"""A stream cut into steps: joined it is the stream, the steady step repeats, and no step needs the
next one's batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.parallel.pipeline.actions import COMPUTE, Kind
from plait.parallel.pipeline.clock import producers
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.steps import shifted, split_steps


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
def test_steps_of_a_stream(name: str, p: int, m: int) -> None:
    stream = lower(make(name, p, m, num_steps=5))
    parts = split_steps(stream)
    assert [sum((part.ranks[rank] for part in parts), ()) for rank in range(p)] == list(
        stream.ranks
    )
    assert [[shifted(a, m) for a in actions] for actions in parts[2].ranks] == [
        list(actions) for actions in parts[3].ranks
    ]
    for step in range(4):
        done = {a for part in parts[: step + 1] for actions in part.ranks for a in actions}
        done |= {replace(a, kind=Kind.INPUT_GRAD) for a in done if a.kind is Kind.BACKWARD}
        needed = {
            need
            for a in done
            if a.kind in (COMPUTE - {Kind.WEIGHT_GRAD})
            for need in producers(a, p)
        }
        missing = {need for need in needed - done if replace(need, kind=Kind.BACKWARD) not in done}
        assert not missing
        sent = {a for a in done if a.kind in (Kind.SEND_F, Kind.SEND_B)}
        received = {a for a in done if a.kind in (Kind.RECV_F, Kind.RECV_B)}
        assert len(sent) <= len(
            received
        )  # what is sent has its receive posted; receives may be early


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_flush_steps_are_all_alike(name: str) -> None:
    parts = split_steps(make(name, 3, 6, num_steps=3))
    assert [[shifted(a, 6) for a in actions] for actions in parts[0].ranks] == [
        list(actions) for actions in parts[1].ranks
    ]
