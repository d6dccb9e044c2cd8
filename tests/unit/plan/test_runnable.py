"""The one pair of words that can be said and not be run: refused with the reason."""

from __future__ import annotations

import pytest

from plait.errors import NotAvailable
from plait.plan import Plan, check_runnable, is_runnable


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
        check_runnable(Plan.parse(text))
    assert not is_runnable(Plan.parse(text))
    assert str(caught.value).startswith("compile with remat:selective: ") and message in str(
        caught.value
    )


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_fewer_bits_or_scales_of_blocks_can_be_said_and_not_run(word: str) -> None:
    plan = Plan.parse(f"dp2 precision:{word}").check()
    assert str(plan) == f"dp2 precision:{word}"
    with pytest.raises(
        NotAvailable, match=f"precision:{word} can be predicted by .* take precision:bf16"
    ):
        check_runnable(plan)
    assert not is_runnable(plan)


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
    check_runnable(Plan.parse(text))
    assert is_runnable(Plan.parse(text))
