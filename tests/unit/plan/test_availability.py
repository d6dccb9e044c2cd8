"""What is not built is refused by name; the table itself is free to grow, so most cases here patch
it.
"""

from __future__ import annotations

import pytest

from plait.errors import NotAvailable, PlanError
from plait.plan import Plan, availability, check_available
from plait.plan import axes as words


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "dp": frozenset({"allreduce", "zero1"}),
        "tp": frozenset({"1d", "2d"}),
        "pp": frozenset(),
        "ep": frozenset(),
        "cp": frozenset(),
        "remat": frozenset({"none"}),
        "precision": frozenset({"float32", "bf16"}),
        "options": frozenset({"replicate"}),
    }
    monkeypatch.setattr(availability, "BUILT", table)


@pytest.mark.parametrize(
    "text", ["dp1", "dp4:zero1,replicate2 mb4", "tp4:2d precision:bf16", "mb8"]
)
@pytest.mark.usefixtures("built")
def test_what_is_built_passes(text: str) -> None:
    check_available(Plan.parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp2", "pp2: pipeline parallel is not available yet"),
        ("pp1:gpipe", "pp1:gpipe: pipeline parallel is not available yet"),
        ("ep2 dp2", "ep2: expert parallel is not available yet"),
        ("cp2:ulysses", "cp2:ulysses: context parallel is not available yet"),
        ("tp8:3d", "tp8:3d: 3d tensor parallel is not available yet; available: 1d, 2d"),
        (
            "dp2:ring",
            "dp2:ring: ring data parallel is not available yet; available: allreduce, zero1",
        ),
        ("tp2:1d,sp", "tp2:1d,sp: sequence parallel is not available yet"),
        (
            "dp2:zero1,offload",
            "dp2:zero1,offload: offloading the optimizer state is not available yet",
        ),
        ("compile", "compile: compiling the model is not available yet"),
        ("remat:full", "remat:full: full recomputation is not available yet; available: none"),
        (
            "precision:float64",
            "precision:float64: float64 precision is not available yet; available: float32, bf16",
        ),
    ],
)
@pytest.mark.usefixtures("built")
def test_what_is_not_built_is_named(text: str, message: str) -> None:
    with pytest.raises(NotAvailable) as caught:
        check_available(Plan.parse(text))
    assert str(caught.value) == message
    assert isinstance(caught.value, PlanError)


@pytest.mark.usefixtures("built")
def test_all_missing_terms_at_once() -> None:
    with pytest.raises(NotAvailable) as caught:
        check_available(Plan.parse("pp2 cp2 compile"))
    assert str(caught.value).splitlines() == [
        "plan 'pp2 cp2 compile' has 3 terms that do not run yet:",
        "  pp2: pipeline parallel is not available yet",
        "  cp2: context parallel is not available yet",
        "  compile: compiling the model is not available yet",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp2 remat:selective compile", "and tp2 cuts each block into several"),
        ("cp2 remat:selective compile", "and cp2 cuts each block into several"),
        ("dp2 ep2 remat:selective compile", "and ep2 cuts each block into several"),
        ("pp2:zb-h1 mb4 remat:selective compile", "and pp2:zb-h1 cuts each block into several"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(NotAvailable, match="leave compile out") as caught:
        check_available(Plan.parse(text))
    assert str(caught.value).startswith("compile with remat:selective: ") and message in str(
        caught.value
    )


@pytest.mark.parametrize(
    "text",
    [
        "compile",
        "dp4:zero3 remat:full compile",
        "pp2:interleaved,v2 dp2:zero1 mb4 remat:selective compile",
        "pp2:zbv tp4:2d mb4 compile",
        "cp2 dp2 ep2 tp2:1d,sp compile",
    ],
)
def test_what_can_be_compiled_passes(text: str) -> None:
    check_available(Plan.parse(text))


def test_the_table_holds_only_words_of_the_grammar() -> None:
    known = {
        "dp": words.DATA_STRATEGIES,
        "tp": words.TENSOR_MODES,
        "pp": words.PIPELINE_SCHEDULES,
        "ep": ("ep",),
        "cp": words.CONTEXT_STRATEGIES,
        "remat": words.REMATS,
        "precision": words.PRECISIONS,
        "options": ("replicate", "offload", "sp", "compile"),
    }
    assert availability.BUILT.keys() == known.keys()
    for axis, built in availability.BUILT.items():
        assert built <= set(known[axis])
    check_available(Plan())
