"""Proof that a parallel run computes what one device computes, and a diagnosis when it does not.

`differential` checks anybody's training step; `run` checks a plan of this library. Both compare
loss, every gradient and every parameter. A loss curve hides most gradient errors, and Adam hides
every constant factor.
"""

from __future__ import annotations

from plait.verify.diagnosis.bisect import FailingSet, bisect
from plait.verify.diagnosis.finding import Facts, Finding
from plait.verify.external import Parallel, differential, judge
from plait.verify.record.observation import (
    Contribution,
    Observation,
    RankView,
    Record,
    gradients_of,
    merge,
    parameters_of,
)
from plait.verify.reference.one_device import Slice, run_reference
from plait.verify.reference.recipe import Recipe
from plait.verify.report import Report
from plait.verify.run import run

__all__ = [
    "Contribution",
    "Facts",
    "FailingSet",
    "Finding",
    "Observation",
    "Parallel",
    "RankView",
    "Recipe",
    "Record",
    "Report",
    "Slice",
    "bisect",
    "differential",
    "gradients_of",
    "judge",
    "merge",
    "parameters_of",
    "run",
    "run_reference",
]
