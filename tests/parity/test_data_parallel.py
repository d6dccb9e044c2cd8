"""The parity table of the data axis: every strategy, family, number of ranks and of micro-batches,
against one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.rows import long_but
from tests.parity.families import FAMILIES
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]

STRATEGIES = {
    "allreduce": (1, 2, 4),
    "ring": (1, 2, 4),
    "server": (1, 2, 4),
    "zero1": (1, 2, 4),
    "zero2": (1, 2, 4),
    "zero3": (1, 2, 4),
    "zero3,replicate2": (2, 4),
    "zero1,offload": (1, 2, 4),
}


def is_short(strategy: str, family: str) -> bool:
    return family == "gpt" or strategy == "zero3" or (strategy, family) == ("allreduce", "resnet")


ROWS = [
    pytest.param(strategy, family, marks=[] if is_short(strategy, family) else [pytest.mark.long])
    for strategy in STRATEGIES
    for family in FAMILIES
]


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(("strategy", "family"), ROWS)
def test_equals_one_device(ranks: Run, family: str, strategy: str, micro_batches: int) -> None:
    for size in STRATEGIES[strategy]:
        plan = f"dp{size}:{strategy} mb{micro_batches} precision:float64"
        outcome = check(ranks, plan, family)
        assert outcome.largest <= TOLERANCE, (plan, outcome)


@pytest.mark.parametrize(
    "plan",
    [
        "dp2",
        "dp4:server mb2",
        "dp4:zero1 mb3",
        "dp2:zero2 mb2",
        "dp4:zero3,replicate2",
        "dp4:zero3",
    ],
)
def test_clips_by_the_global_norm(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "gpt", clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("remat", long_but(["full"], ["selective", "full"]))
@pytest.mark.parametrize("plan", ["dp1", "dp2 mb2", "dp2:zero2 mb2", "dp2:zero3 mb2"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "llama")
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    ["dp4", "dp4:ring mb2", "dp4:server mb2", "dp4:zero1 mb3", "dp4:zero2 mb3", "dp4:zero3 mb3"],
)
@pytest.mark.parametrize("num_samples", long_but([3, 13], [3, 5, 13]))
def test_batches_that_do_not_divide(ranks: Run, plan: str, num_samples: int) -> None:
    """Fewer samples than ranks too: a rank without any takes part in every collective and adds
    nothing.
    """
    outcome = check(ranks, f"{plan} precision:float64", "gpt", num_samples)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_any_number_of_servers(ranks: Run, num_servers: int) -> None:
    outcome = check(ranks, "dp4:server mb2 precision:float64", "llama", num_servers=num_servers)
    assert outcome.largest <= TOLERANCE, outcome
