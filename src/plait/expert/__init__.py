"""Split the experts: where tokens go, how they get there and back, and how the load is kept even
and visible.
"""

from __future__ import annotations

from plait.expert.dispatch import ExpertExchange
from plait.expert.journey import Roads
from plait.expert.placement import Layout
from plait.expert.product import Choice
from plait.expert.replace import Placer, Placing, put
from plait.expert.split import ExpertSplit, apply
from plait.expert.surroundings import RankSurroundings, SequenceCut

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
