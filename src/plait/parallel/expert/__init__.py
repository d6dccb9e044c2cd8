"""Split the experts: where tokens go, how they travel, and how the load is kept even and
visible.
"""

from __future__ import annotations

from plait.parallel.expert.dispatch import ExpertExchange
from plait.parallel.expert.placement import ExpertPlacement
from plait.parallel.expert.product import ProductChoice
from plait.parallel.expert.replace import Placer, Placing, put
from plait.parallel.expert.route import AllToAllGroups
from plait.parallel.expert.router_context import RankRouterContext, SequenceCut
from plait.parallel.expert.split import ExpertPart, ExpertSplit, apply

__all__ = [
    "AllToAllGroups",
    "ExpertExchange",
    "ExpertPart",
    "ExpertPlacement",
    "ExpertSplit",
    "Placer",
    "Placing",
    "ProductChoice",
    "RankRouterContext",
    "SequenceCut",
    "apply",
    "put",
]
