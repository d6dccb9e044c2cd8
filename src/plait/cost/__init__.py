"""Predict: a model description, a plan and a cluster give memory, traffic and time, without torch
and in milliseconds.
"""

from plait.cost.blocks import BlockRow, block_table
from plait.cost.describe import describe
from plait.cost.door import estimate
from plait.cost.machine import Efficiency
from plait.cost.records import Breakdown, Estimate, Job, Runtime

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
