"""Split the experts: where tokens go, how they get there and back, and how the load is kept even and visible."""

from __future__ import annotations

from plait.expert.dispatch import ExpertExchange
from plait.expert.split import ExpertSplit, apply
from plait.expert.surroundings import RankSurroundings, SequenceCut

__all__ = ["ExpertExchange", "ExpertSplit", "RankSurroundings", "SequenceCut", "apply"]
