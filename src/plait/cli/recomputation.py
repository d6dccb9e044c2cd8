"""`remat:auto` before a run: the planner's choice for each block, written into the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.cli import common
from plait.errors import PlanError
from plait.launcher import joined_world
from plait.plan import Plan

if TYPE_CHECKING:
    from plait.config import Config

GIB = 2.0**30


def with_remat(config: Config, plan: Plan) -> Config:
    """The config with `plan.remat` of each block, where the plan says `remat:auto`.

    Words that the config has are kept. In a world that has begun rank 0 chooses for all.
    Collective there. Errors: those of an estimate, and `PlanError` where no choice fits.
    """
    if plan.remat != "auto" or config.plan.remat:
        return config
    if joined_world() is None:
        common.measured(config.cluster.name)
        text = _chosen(config, plan)
    else:
        text = common.agreed(config, lambda: _chosen(config, plan))
    return common.with_words(config, tuple(text.split()))


def _chosen(config: Config, plan: Plan) -> str:
    """The words of the blocks, with blanks between them."""
    from plait.predict.cost import estimate

    guess = estimate(config.as_dict(), plan)
    if not guess.fits:
        raise PlanError(
            f"plan '{plan}' does not fit on {config.cluster.name}, whatever its blocks keep: the "
            f"least is {guess.memory.total / GIB:.3g} GiB a rank, and "
            f"{guess.memory_limit / GIB:.3g} are there; take dp:zero3, more micro-batches (mb) or "
            "more ranks, or write remat:full to try it nevertheless"
        )
    return " ".join(guess.remat)
