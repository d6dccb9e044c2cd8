"""Versions follow from order: PipeDream's w(t-n+1)..w(t), 2BW's W(t-1), and one for everything that
flushes.
"""

from __future__ import annotations

from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.weights import stage_weights


def test_pipedream_stage_s_sees_weights_p_minus_1_minus_s_updates_old() -> None:
    p = 4
    m = 10
    for stage, weights in enumerate(stage_weights(make("pipedream", p, m))):
        assert weights.seen == {j: max(0, j - (p - 1 - stage)) for j in range(m)}
        assert weights.applied == {j: j for j in range(m)}


def test_2bw_every_stage_uses_the_weights_before_the_newest_for_a_whole_step() -> None:
    p = 3
    m = 4
    for weights in stage_weights(make("2bw", p, m, num_steps=4)):
        assert weights.seen == {j: max(0, j // m - 1) for j in range(4 * m)}
        assert weights.applied == {j: j // m for j in range(4 * m)}
        assert (weights.num_versions, weights.staleness) == (2, 1)


def test_one_stage_is_the_serial_run_for_pipedream() -> None:
    (weights,) = stage_weights(make("pipedream", 1, 5))
    assert (weights.num_versions, weights.staleness) == (1, 0)


def test_repeated_flush_steps_see_their_own_weights() -> None:
    for weights in stage_weights(make("1f1b", 3, 4, num_steps=3)):
        assert weights.seen == weights.applied == {j: j // 4 for j in range(12)}
        assert weights.num_versions == 1
