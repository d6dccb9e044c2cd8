"""The rules of a plan by itself: each with its message, and all of them at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import ContextAxis, DataAxis, PipelineAxis, Plan, TensorAxis
from plait.plan.axes import cube_root

patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no failure

GOOD = [
    "dp1",
    "tp1:2d",
    "tp4:2d",
    "tp9:2d",
    "tp8:2.5d,depth2",
    "tp4:2.5d",
    "tp8:3d",
    "tp1:3d",
    "dp8:zero3,replicate2,offload",
    "dp4:zero1,replicate4",
    "pp4:interleaved,v2 mb4",
    "pp4:2bw mb4",
    "pp4 mb2",
    "pp4:gpipe mb1",
    "ep4 dp2 cp2",
    "ep2 dp4:zero3",
    "dp2:async-server,stale0",
    "dp2:local,every1",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_plans_pass(text: str) -> None:
    plan = Plan.parse(text)
    assert plan.check() is plan


# (text, the whole message)
BAD = {
    "tp6:2d": "tp6:2d needs a square number of ranks; the nearest are tp4:2d and tp9:2d",
    "tp2:2d": "tp2:2d needs a square number of ranks; the nearest are tp1:2d and tp4:2d",
    "tp9:3d": "tp9:3d needs a cubic number of ranks; the nearest are tp8:3d and tp27:3d",
    "tp10:2.5d,depth2": (
        "tp10:2.5d,depth2 needs q x q x 2 ranks; the nearest are tp8:2.5d,depth2 and "
        "tp18:2.5d,depth2"
    ),
    "tp8:2.5d": (
        "tp8:2.5d,depth1 needs q x q x 1 ranks; the nearest are tp4:2.5d,depth1 and "
        "tp9:2.5d,depth1; with another depth: tp8:2.5d,depth2"
    ),
    "tp1:2.5d,depth2": "tp1:2.5d,depth2 needs q x q x 2 ranks; the nearest is tp2:2.5d,depth2",
    "dp6:zero3,replicate4": (
        "dp6:zero3,replicate4: replicate4 does not divide dp6; choose a divisor of 6, as replicate2"
    ),
    "dp5:zero1,replicate2": "dp5:zero1,replicate2: replicate2 does not divide dp5; choose a "
    "divisor of 5",
    "pp4:interleaved,v1": "pp4:interleaved,v1 mb4: interleaved needs v2 or more; say "
    "interleaved,v2, or take 1f1b with one",
    "pp4:dualpipev mb4": (
        "pp4:dualpipev mb4: dualpipev on 4 ranks needs at least 8 micro-batches, got 4; write mb8"
    ),
    "pp4:2bw mb3": "pp4:2bw mb3: 2bw on 4 ranks needs at least 4 micro-batches, got 3; write mb4",
    "ep4 dp6": "ep4 borrows its ranks from dp6 x cp1 = 6, which it does not divide; choose a "
    "divisor of 6, as ep2, or dp4",
    "ep2": "ep2 borrows its ranks from dp1 x cp1 = 1, which it does not divide; choose a divisor "
    "of 1, or dp2",
}


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_each_rule_says_what_and_how(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text).check()
    assert str(caught.value) == message


def test_all_failures_are_reported_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("tp6:2d dp5:zero1,replicate2 ep3 pp4:2bw mb2").check()
    lines = str(caught.value).splitlines()
    assert lines[0] == "plan 'pp4:2bw tp6:2d dp5:zero1,replicate2 ep3 mb2' breaks 4 rules:"
    for number, start in enumerate(
        ["dp5:zero1,replicate2", "tp6:2d", "pp4:2bw mb2", "ep3"], start=1
    ):
        assert lines[number].strip().startswith(start)


# what only a plan built by hand can be
BY_HAND: list[tuple[dict[str, Any], str]] = [
    ({"dp": DataAxis(0)}, "dp: size must be a whole number from 1, not 0"),
    ({"dp": DataAxis(-2)}, "dp: size must be a whole number from 1, not -2"),
    ({"tp": TensorAxis(2.0)}, "tp: size must be a whole number from 1, not 2.0"),  # type: ignore[arg-type]
    ({"tp": TensorAxis(True)}, "tp: size must be a whole number from 1, not True"),
    ({"pp": PipelineAxis(2, virtual=-1)}, "pp: virtual must be a whole number from 1, not -1"),
    ({"cp": ContextAxis("2")}, "cp: size must be a whole number from 1, not '2'"),  # type: ignore[arg-type]
    ({"ep": 0}, "plan: ep must be a whole number from 1, not 0"),
    ({"micro_batches": -1}, "plan: micro_batches must be a whole number from 1, not -1"),
    ({"dp": DataAxis(2, "zreo3")}, "dp: unknown strategy 'zreo3'; did you mean 'zero3'?"),  # type: ignore[arg-type]
    ({"tp": TensorAxis(2, "4d")}, "tp: unknown mode '4d'; known: 1d, 2.5d, 2d, 3d"),  # type: ignore[arg-type]
    ({"pp": PipelineAxis(2, "1b1f")}, "pp: unknown schedule '1b1f'"),
    ({"cp": ContextAxis(2, "rings")}, "cp: unknown strategy 'rings'; did you mean 'ring'?"),  # type: ignore[arg-type]
    ({"remat": "some"}, "remat: unknown word 'some'"),
    ({"precision": "float16"}, "precision: unknown word 'float16'"),
    ({"dp": DataAxis(2, "async-server")}, "async-server needs staleK"),
    ({"dp": DataAxis(2, "async-server", stale=-1)}, "async-server needs staleK"),
    ({"dp": DataAxis(2, "local")}, "local needs everyH"),
    ({"dp": DataAxis(2, "ring", stale=1)}, "stale1 belongs to async-server"),
    ({"dp": DataAxis(2, replicate=2)}, "replicate2 belongs to zero1, zero2 and zero3"),
    ({"dp": DataAxis(2, offload=True)}, "offload belongs to zero1, zero2 and zero3"),
    ({"tp": TensorAxis(4, "2d", sequence_parallel=True)}, "sp belongs to 1d"),
    ({"tp": TensorAxis(4, "1d", depth=2)}, "depth2 belongs to 2.5d"),
    ({"pp": PipelineAxis(2, "1f1b", 2)}, "v2 belongs to interleaved"),
]


@pytest.mark.parametrize(("fields", "message"), BY_HAND)
def test_plans_built_by_hand_are_checked_too(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**fields).check()
    assert message in str(caught.value)


def test_huge_numbers_are_answered_at_once() -> None:
    with pytest.raises(PlanError, match="does not divide dp999999999"):
        Plan.parse("dp999999999:zero1,replicate2").check()
    with pytest.raises(
        PlanError,
        match="needs a cubic number of ranks; the nearest are tp997002999:3d and tp1000000000:3d",
    ):
        Plan.parse("tp999999999:3d").check()


@patient
@given(st.integers(1, 10**9))
def test_cube_root_is_exact(number: int) -> None:
    q = cube_root(number)
    assert q**3 <= number < (q + 1) ** 3


@patient
@given(st.integers(1, 400), st.integers(1, 6))
def test_the_nearest_grids_that_are_proposed_are_good(size: int, depth: int) -> None:
    for mode in ("2d", f"2.5d,depth{depth}", "3d"):
        try:
            Plan.parse(f"tp{size}:{mode}").check()
        except PlanError as error:
            proposed = [
                word.rstrip(".")
                for word in str(error).split(";")[1].split()
                if word.startswith("tp")
            ]
            assert proposed
            for text in proposed:
                Plan.parse(text).check()


@pytest.mark.parametrize(
    ("name", "axis"),
    [("dp", "DataAxis"), ("tp", "TensorAxis"), ("pp", "PipelineAxis"), ("cp", "ContextAxis")],
)
def test_a_bare_number_is_no_axis(name: str, axis: str) -> None:
    words: Any = {name: 3}
    with pytest.raises(PlanError, match=f"{name} = 3 is no {axis}; write Plan.parse.'{name}3'"):
        Plan(**words)
