"""Every generated schedule verifies, and its bubble and memory are those of the literature.

Sources of the closed forms: Qi et al., arXiv 2401.10241, table 2 (1F1B, ZB-H1, ZB-H2); Narayanan et
al., arXiv 2104.04473, section 2.2 (interleaved); Qi et al., arXiv 2405.15362, table 1 (V-Min,
V-Half, ZBV); DualPipe's README (DualPipeV).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Schedule, forward
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.schedules import SCHEDULES, Family, adopt, make, stages_per_rank
from plait.parallel.pipeline.simulate import Costs, simulate
from plait.parallel.pipeline.verify import verify


def smallest(name: str, p: int) -> int:
    return SCHEDULES[name].facts.least_micro_batches(p)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(0, 12),
    st.integers(2, 4),
    st.integers(1, 2),
)
def test_every_schedule_verifies_as_generated_and_lowered(
    name: str, p: int, more: int, v: int, num_steps: int
) -> None:
    schedule = make(
        name, p, smallest(name, p) + more, v if name == "interleaved" else 0, num_steps=num_steps
    )
    verify(schedule)
    verify(lower(schedule))
    verify(lower(schedule, max_unsharded=1))
    assert schedule.num_stages == p * stages_per_rank(name, v)


def idle(schedule: Schedule) -> float:
    """Idle units of the period: the bubble times what the period lasts."""
    result = simulate(schedule)
    return result.bubble_fraction * result.period_seconds


ranks_and_more = (st.integers(1, 7), st.integers(0, 12))


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_bubble_of_the_classics(p: int, more: int) -> None:
    m = 1 + more
    fraction = (p - 1) / (m + p - 1)
    assert simulate(make("gpipe", p, m)).bubble_fraction == pytest.approx(fraction)
    assert simulate(make("1f1b", p, m)).bubble_fraction == pytest.approx(fraction)
    assert simulate(make("naive", p, m)).bubble_fraction == pytest.approx((p - 1) / p)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_bubble_of_interleaved_is_divided_by_v(p: int, rounds: int, v: int) -> None:
    schedule = make("interleaved", p, rounds * p, v)
    assert idle(schedule) / v == pytest.approx(3 * (p - 1) / v)  # a stage costs 3/v of a rank's 3
    assert max(simulate(schedule).peak_activations_per_rank) <= p * (1 + (p - 1) / (p * v)) + 1e-9


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_interleaved_takes_any_number_of_micro_batches(p: int, v: int) -> None:
    for m in range(1, 3 * p + 2):
        verify(make("interleaved", p, m, v))


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(p: int, more: int) -> None:
    schedule = make("zb-h1", p, p + more)
    assert idle(schedule) == pytest.approx(p - 1)
    assert max(simulate(schedule).peak_activations) == p


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_zb_h2_has_no_bubble_in_twice_the_memory(p: int, more: int) -> None:
    schedule = make("zb-h2", p, 2 * p - 1 + more)
    assert idle(schedule) == pytest.approx(0)
    assert max(simulate(schedule).peak_activations) == 2 * p - 1


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_zbv_has_no_bubble_in_the_memory_of_1f1b(p: int, more: int) -> None:
    schedule = make("zbv", p, 2 * p + more)
    assert idle(schedule) == pytest.approx(0)
    assert set(simulate(schedule).peak_activations_per_rank) == {p}


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_v_half_and_v_min_keep_their_bounds(p: int, more: int) -> None:
    flush = 6 * (p - 1)  # of 1F1B, in passes of half a rank's layers
    for name, bubble, memory in (
        ("v-half", flush / 2, p / 2),
        ("v-min", flush * 2 / 3, -(-p // 3)),
    ):
        schedule = make(name, p, p + more)
        assert idle(schedule) <= bubble + 1e-9, name
        assert max(simulate(schedule).peak_activations_per_rank) <= memory + 1, name


@settings(max_examples=25, deadline=None)
@given(*ranks_and_more)
def test_dualpipev_keeps_its_bounds(p: int, more: int) -> None:
    schedule = make("dualpipev", p, 2 * p + more)
    assert idle(schedule) <= 2 * (p - 1) + 1e-9  # (p-1)(F&B + B - 3W) with F&B = 3
    assert max(simulate(schedule).peak_activations_per_rank) <= p + 0.5


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["pipedream", "2bw"]), *ranks_and_more)
def test_asynchronous_pipelines_have_no_bubble_in_the_steady_state(
    name: str, p: int, more: int
) -> None:
    result = simulate(make(name, p, p + more, num_steps=3))
    assert result.bubble_fraction == pytest.approx(0)
    assert result.peak_activations == tuple(p - stage for stage in range(p))
    assert result.weight_versions == (
        (2,) * p if name == "2bw" else tuple(p - stage for stage in range(p))
    )
    assert result.staleness == (
        (1,) * p if name == "2bw" else tuple(p - 1 - stage for stage in range(p))
    )


def test_the_table_of_the_four_classics_at_4_stages_and_8_micro_batches() -> None:
    gpipe = simulate(make("gpipe", 4, 8))
    flush = simulate(make("1f1b", 4, 8))
    assert (gpipe.peak_activations, flush.peak_activations) == ((8, 8, 8, 8), (4, 3, 2, 1))
    assert gpipe.weight_versions == flush.weight_versions == (1, 1, 1, 1)
    assert simulate(make("pipedream", 4, 8)).weight_versions == (4, 3, 2, 1)
    assert simulate(make("2bw", 4, 8, num_steps=3)).weight_versions == (2, 2, 2, 2)


def test_with_a_barrier_after_the_step_zero_bubble_still_waits_for_the_ranks_to_fill() -> None:
    result = simulate(make("zb-h2", 4, 8))
    assert result.bubble_fraction == 0
    assert result.makespan_seconds == 3 * 8 + 3


def test_split_backwards_cost_what_a_whole_one_does_unless_said_otherwise() -> None:
    costs = Costs(forward_seconds=(1.0, 2.0), input_grad_seconds=1.5, weight_grad_seconds=0.5)
    assert simulate(make("naive", 2, 3), costs).makespan_seconds == pytest.approx(
        3 * (1 + 2 + 2 * 2.0)
    )
    fused = Costs(forward_seconds=(1.0, 2.0), backward_seconds=1.75, transfer_seconds=0.25)
    assert simulate(make("naive", 2, 3), fused).makespan_seconds == pytest.approx(
        3 * (1 + 2 + 2 * 1.75 + 2 * 0.25)
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("1fb1", (2, 2), "did you mean '1f1b'"),
        ("1f1b", (0, 2), "0 ranks"),
        ("1f1b", (2, 0), "0 micro-batches"),
        ("2bw", (4, 3), "needs at least 4 micro-batches, got 3"),
        ("dualpipev", (4, 7), "needs at least 8 micro-batches"),
        ("1f1b", (4, 8, 2), "puts 1 stage"),
        ("zbv", (4, 8, 3), "puts 2 stage"),
        ("interleaved", (4, 8, 1), "say interleaved,v2"),
    ],
)
def test_errors_name_the_number_and_the_cure(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make(name, *shape)


def test_a_user_s_schedule_is_verified_before_it_is_returned() -> None:
    def lazy(p: int, m: int) -> Schedule:
        return Schedule(
            "lazy", tuple(range(p)), m, tuple((forward(stage, 0),) for stage in range(p))
        )

    mine = {**SCHEDULES, "lazy": Family(lazy), "eager": SCHEDULES["gpipe"]}
    with pytest.raises(ScheduleError, match="backward is B, or I and W; found nothing"):
        make("lazy", 2, 1, known=mine)
    assert make("eager", 2, 2, known=mine) == make("gpipe", 2, 2)


def test_a_schedule_from_outside_is_adopted_if_it_fits_the_plan() -> None:
    assert adopt(make("gpipe", 2, 4), 2, 4) == make("gpipe", 2, 4)
    with pytest.raises(
        ScheduleError, match=r"of 2 ranks and 4 micro-batches, the plan of 4 and 4; say pp2 mb4"
    ):
        adopt(make("gpipe", 2, 4), 4, 4)
    with pytest.raises(ScheduleError, match="Steps that overlap"):
        adopt(make("2bw", 2, 4), 2, 4)
    with pytest.raises(ScheduleError, match="backward is B, or I and W"):
        adopt(Schedule("half", (0, 1), 1, ((forward(0, 0),), (forward(1, 0),))), 2, 1)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_what_is_lowered_stays_as_it_is(name: str) -> None:
    lowered = lower(make(name, 2, 4))
    assert lower(lowered) == lowered
