"""Declare *what*: the Plan, its text form and its checks. Pure and frozen; imports no torch.

`Plan.parse` reads, and `Plan.check` asks the rules of the plan alone. `check_world`, `check_batch`
and `check_model` ask whether it fits. `check_runnable` asks for the one pair of words that no rank
can run.
"""

from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis, TensorAxis
from plait.plan.fit import (
    check_batch,
    check_config,
    check_model,
    check_restarts,
    check_runnable,
    check_world,
    is_runnable,
)
from plait.plan.gathered import (
    KeepGathered,
    check_kept,
    gathers_layers,
    kept_blocks,
    kept_key,
    kept_text,
)
from plait.plan.plan import Plan
from plait.plan.recomputation import remat_text
from plait.plan.shares import check_shares, shares_of, shares_text, whole_shares

__all__ = [
    "ContextAxis",
    "DataAxis",
    "KeepGathered",
    "PipelineAxis",
    "Plan",
    "TensorAxis",
    "check_batch",
    "check_config",
    "check_kept",
    "check_model",
    "check_restarts",
    "check_runnable",
    "check_shares",
    "check_world",
    "gathers_layers",
    "is_runnable",
    "kept_blocks",
    "kept_key",
    "kept_text",
    "remat_text",
    "shares_of",
    "shares_text",
    "whole_shares",
]
