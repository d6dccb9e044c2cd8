"""Checks of the keys of `[plan]` against the model, before any rank starts.

The keys of plait's own models say what layers they have. Other models are looked at by their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import ModelError, NotAvailable, ScheduleError
from plait.plan.gathered import kept_blocks
from plait.toml import is_file

if TYPE_CHECKING:
    from plait.config import Config
    from plait.config.sections import PlanSection
    from plait.plan import Plan


def check_plan_keys(config: Config, plan: Plan) -> None:
    """Refuse blocks, experts and stages that the model does not have, and wrong schedules.
    Errors: `PlanError`, `NotAvailable`, `ModelError`, `ScheduleError`.
    """
    from plait.config.model import TransformerConfig

    model: Any = config.model
    is_own = isinstance(model, TransformerConfig)
    if is_own:
        keep = config.plan.keep_gathered
        if keep != "auto":
            kept_blocks(plan, keep, model.num_hidden_layers)
        _check_experts(plan, getattr(model, "num_local_experts", None))
    if plan.pp.size > 1 and config.plan.schedule is None:
        _check_stages(config.plan, plan)
        if is_own and config.plan.splits:
            _check_names(config, config.plan.splits)
    _check_schedule(config.plan.schedule, plan)


def _check_schedule(path: str | None, plan: Plan) -> None:
    """Refuse a `plan.schedule` that is no file, or whose schedule does not fit the plan."""
    if path is None or plan.pp.size == 1:
        return
    if not is_file(path):
        raise ScheduleError(
            f"plan.schedule {path!r} is no file; name a text file with a schedule, or leave the "
            "key out"
        )
    from plait.parallel.pipeline.schedules import adopt
    from plait.parallel.pipeline.text import load

    adopt(load(path), plan.pp.size, plan.micro_batches)


def _check_experts(plan: Plan, num_experts: int | None) -> None:
    if num_experts and plan.tp.size > 1 and plan.tp.mode != "1d":
        raise NotAvailable(
            f"{plan.tp} cuts the tokens or features that the routers of {num_experts} experts "
            f"read; experts run under tp{plan.tp.size}:1d"
        )


def _check_stages(section: PlanSection, plan: Plan) -> None:
    """Refuse `counts` and `splits` of another number of stages."""
    counts, splits = section.counts, section.splits
    if counts is not None and splits is not None:
        raise ModelError("plan.counts and plan.splits both cut the model; leave one of them out")
    num_stages = plan.pp.num_stages
    if counts is not None and len(counts) != num_stages:
        raise ModelError(
            f"plan.counts {list(counts)} has {len(counts)} numbers, and plan '{plan}' has "
            f"{num_stages} stages; give one number for each stage"
        )
    if splits is not None and len(splits) + 1 != num_stages:
        raise ModelError(
            f"plan.splits {list(splits)} makes {len(splits) + 1} stages, and plan '{plan}' has "
            f"{num_stages}; name the first layer of each stage but the first"
        )


def _check_names(config: Config, splits: Sequence[str]) -> None:
    """Refuse names of layers that the model does not have."""
    from plait.engine.stages.chain import find_chain
    from plait.run import assemble

    layers = find_chain(assemble.bare_model(assemble.model_keys(config)), None)
    unknown = [name for name in splits if name not in layers]
    if unknown:
        raise ModelError(
            f"plan.splits: no layer is called '{unknown[0]}'; layers: {', '.join(layers)}"
        )
