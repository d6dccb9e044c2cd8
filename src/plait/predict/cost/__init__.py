"""Predict: a model description, a plan and a cluster give memory, traffic and time, without torch
and in milliseconds.
"""

from plait.predict.cost.api import estimate
from plait.predict.cost.model.blocks import BlockRow, block_table
from plait.predict.cost.model.describe import describe
from plait.predict.cost.records import Breakdown, Estimate, Job
from plait.predict.cost.runtime import Runtime
from plait.predict.cost.time.machine import Efficiency

__all__ = [
    "BlockRow",
    "Breakdown",
    "Efficiency",
    "Estimate",
    "Job",
    "Runtime",
    "block_table",
    "describe",
    "estimate",
]
