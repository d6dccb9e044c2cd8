"""Declare *what*: the Plan, its text form and its checks. Pure and frozen; imports no torch.

`Plan.parse` reads, `Plan.check` asks the rules of the plan alone, `check_world`, `check_batch` and
`check_model` ask whether it fits, `check_available` asks whether this version runs it.
"""

from plait.plan.availability import check_available
from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis, TensorAxis
from plait.plan.fit import check_batch, check_config, check_model, check_restarts, check_world
from plait.plan.plan import Plan

__all__ = [
    "ContextAxis",
    "DataAxis",
    "PipelineAxis",
    "Plan",
    "TensorAxis",
    "check_available",
    "check_batch",
    "check_config",
    "check_model",
    "check_restarts",
    "check_world",
]
