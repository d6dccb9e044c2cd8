"""A rank is killed in a live run, started again, and in again while the others go on; what all
computed is replayed exactly.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plait import launch
from plait.errors import RankFailed
from plait.outer import Asynchrony
from plait.verify.record.compare import largest, relative_error
from tests.fault import coming_and_going as ranks
from tests.fault.coming_and_going import AFTERWARDS, AT_STEP, DIES, Batches
from tests.parity.families import FAMILIES
from tests.parity.harness import TOLERANCE, join
from tests.parity.replay import Outer, Values, local_rounds, replay
from tests.parity.test_local import sgd

EVERY = 3
SIZE = 3


def error(weights: Values, expected: Values) -> float:
    return max(
        relative_error(weights[n].view_as(v), v, largest(expected)) for n, v in expected.items()
    )


@pytest.mark.parametrize("in_outer_step", [False, True], ids=["between", "in the outer step"])
def test_a_rank_of_local_sgd_leaves_and_joins_between_rounds(
    in_outer_step: bool, tmp_path: Path
) -> None:
    """Where it dies while the others sum, these sum again without it."""
    asynchrony = Asynchrony(outer_lr=0.7, outer_momentum=0.9)
    plan = f"dp{SIZE}:local,every{EVERY} precision:float64"
    results = launch(
        ranks.local,
        plan,
        str(tmp_path),
        {"asynchrony": asynchrony},
        in_outer_step,
        nproc=SIZE,
        restarts=1,
    )
    assert len(results) == SIZE
    left = AT_STEP // EVERY  # the round that it dies in is the first that it is missing from
    back = (left + 2) * EVERY
    assert results[0][1] == results[2][1] == [((left + 1) * EVERY, SIZE - 1), (back, SIZE)]
    assert [first for first, *_ in results] == [0, back, 0]
    away = {DIES: (left, left + 2)}
    batches = [Batches(rank, SIZE) for rank in range(SIZE)]
    expected = local_rounds(
        FAMILIES["mlp"],
        batches,
        Outer(EVERY, 0.7, 0.9),
        sgd,
        away=away,
        num_steps=back + AFTERWARDS,
    )[-1]
    assert error(join([weights for *_, weights in results]), expected) <= TOLERANCE


def test_a_worker_of_the_asynchronous_server_is_lost_and_rejoins(tmp_path: Path) -> None:
    plan = f"dp{SIZE}:async-server,stale4 precision:float64"
    results = launch(ranks.served, plan, str(tmp_path), nproc=SIZE, restarts=1)
    assert [met for *_, met in results] == [SIZE] * SIZE
    steps = results[DIES][0]
    record = results[0][1]
    assert steps[0] >= AT_STEP and len(steps) == AFTERWARDS + 1
    pushed = [push.step for update in record.log for push in update.pushes if push.worker == DIES]
    assert pushed == [*range(AT_STEP), *steps]
    expected = replay(FAMILIES["mlp"], [Batches(rank, SIZE) for rank in range(SIZE)], [record], sgd)
    assert error(join([weights for _, _, weights, _ in results[:1]]), expected) <= TOLERANCE
    assert max(age for update in record.log for age in update.staleness) <= 4


def test_a_rank_that_dies_in_a_save_does_not_end_the_run(tmp_path: Path) -> None:
    """The others save without it, and it comes back."""
    from plait.checkpoint import Checkpoint

    plan = f"dp{SIZE}:local,every1 precision:float64"
    results = launch(ranks.saving, plan, str(tmp_path), nproc=SIZE, restarts=1)
    assert results == [(0, False, SIZE), (DIES, True, SIZE), (2, False, SIZE)]
    saved = Checkpoint.open(tmp_path / f"step-{AT_STEP:08d}")
    assert saved.meta["step"] == AT_STEP


def test_a_rank_comes_back_at_a_step_that_the_others_save(tmp_path: Path) -> None:
    """It saves that step with them; it would else meet them in another exchange than theirs."""
    plan = f"dp{SIZE}:local,every2 precision:float64"
    results = launch(ranks.joins_at_a_save, plan, str(tmp_path), nproc=SIZE, restarts=1)
    assert results == [(0, False, SIZE), (DIES, True, SIZE), (2, False, SIZE)]


def test_a_rank_at_a_later_save_takes_part_in_that_of_the_others(tmp_path: Path) -> None:
    plan = "dp2:async-server,stale4 precision:float64"
    assert launch(ranks.saves_apart, plan, str(tmp_path), nproc=2, restarts=1) == [[2, 4]] * 2


def test_without_ranks_left_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="killed by SIGKILL"):
        launch(ranks.die, nproc=2, restarts=1)
