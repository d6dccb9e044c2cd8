"""The planner's choices for each block before a run, written into the config: `remat:auto`, and
`keep_gathered = "auto"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.cli import common
from plait.cli.block_choices import with_numbers, with_words
from plait.errors import PlanError
from plait.launcher import joined_world
from plait.launcher.main_process import say
from plait.plan import Plan, gathers_layers

if TYPE_CHECKING:
    from plait.config import Config

GIB = 2.0**30


def with_remat(config: Config, plan: Plan) -> Config:
    """The config with `plan.remat` of each block, where the plan says `remat:auto`, and with the
    blocks that zero3 keeps whole, where `plan.keep_gathered` is `auto`.

    Words that the config has are kept. In a world that has begun rank 0 chooses for all.
    Collective there. Errors: those of an estimate, and `PlanError` where no choice fits.
    """
    recomputes = plan.remat == "auto" and not config.plan.remat
    keep = config.plan.keep_gathered
    keeps = keep == "auto"
    if keep and not keeps and not gathers_layers(plan):
        say(f"plait: plan '{plan}' has one data rank, so plan.keep_gathered does nothing")
    if not recomputes and not keeps:
        return config
    if joined_world() is None:
        common.measured(config.cluster.name)
        text = _chosen(config, plan, recomputes)
    else:
        text = common.agreed(config, lambda: _chosen(config, plan, recomputes))
    words, numbers = (line.split() for line in text.split("\n"))
    if keeps:
        config = with_numbers(config, numbers)
    return with_words(config, tuple(words)) if recomputes else config


def _chosen(config: Config, plan: Plan, recomputes: bool) -> str:
    """The words of the blocks, and the numbers of those that zero3 keeps whole: two lines."""
    from plait.predict.cost import estimate

    guess = estimate(config.as_dict(), plan)
    if recomputes and not guess.fits:
        raise PlanError(
            f"plan '{plan}' does not fit on {config.cluster.name}, whatever its blocks keep: the "
            f"least is {guess.memory.total / GIB:.3g} GiB a rank, and "
            f"{guess.memory_limit / GIB:.3g} are there; take dp:zero3, more micro-batches (mb) or "
            "more ranks, or write remat:full to try it nevertheless"
        )
    kept = (str(number) for number in guess.keep_gathered or ())
    return f"{' '.join(guess.remat)}\n{' '.join(kept)}"
