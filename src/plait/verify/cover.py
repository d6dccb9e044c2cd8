"""Plans that together use every axis that a model allows: what `plait verify --all` walks.

Each row adds one way of splitting, or one meeting of two, to those before it. So a budget that ends
early has seen the axes one by one. At most four ranks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.errors import PlaitError
from plait.plan import Plan

PLANS = (
    "dp2 mb2",
    "tp2:1d,sp",
    "pp2:1f1b mb2",
    "cp2:ring",
    "dp2:zero1 ep2",
    "dp2:zero3 mb2",
    "pp2:1f1b dp2 tp1 mb2",
    "dp2:zero1 tp2:1d,sp",
    "pp2:zb-h1 tp2 mb2",
    "cp2:ulysses dp2",
    "dp2:ring",
    "dp2:server",
    "pp2:interleaved,v2 mb2",
    "tp4:2d",
    "dp2:zero2 mb2 remat:full",
)

FEW_PROBES = ("uneven-tokens", "adamw", "last-batch", "thresholds")
"""The probes of the plans of a cover: scale and counts, state, uneven parts, large tensors."""


def cover(own: Plan, check: Callable[[str], Plan]) -> tuple[list[Plan], dict[str, str]]:
    """The plan of the config, then those of the cover that `check` returns.

    A refused plan is reported with the reason, by its text.
    """
    plans = [own]
    refused = {}
    for text in PLANS:
        try:
            plan = check(text)
        except PlaitError as error:
            refused[text] = str(error)
            continue
        if plan not in plans:
            plans.append(plan)
    return plans, refused
