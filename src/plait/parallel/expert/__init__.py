"""Split the experts: where tokens go, how they get there and back, and how the load is kept even
and visible.
"""

from __future__ import annotations

from plait.parallel.expert.dispatch import ExpertExchange
from plait.parallel.expert.journey import Roads
from plait.parallel.expert.placement import Layout
from plait.parallel.expert.product import Choice
from plait.parallel.expert.replace import Placer, Placing, put
from plait.parallel.expert.split import ExpertSplit, apply
from plait.parallel.expert.surroundings import RankSurroundings, SequenceCut

__all__ = [
    "Choice",
    "ExpertExchange",
    "ExpertSplit",
    "Layout",
    "Placer",
    "Placing",
    "RankSurroundings",
    "Roads",
    "SequenceCut",
    "apply",
    "put",
]
