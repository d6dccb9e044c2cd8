"""Choices for each block, as keys of a config: words of recomputation, and blocks that zero3 keeps
whole. The planner made them; a user may write the same by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.launcher.main_process import say
from plait.plan import KeepGathered, kept_text, remat_text

if TYPE_CHECKING:
    from plait.config import Config


def with_words(config: Config, words: tuple[str, ...]) -> Config:
    """The config with the recomputation of each block, where there are words for it."""
    if not words:
        return config
    section = config.plan.model_validate({**config.plan.as_dict(), "remat": words})
    say(f"plait: remat:auto on {config.cluster.name}: {remat_text(section.remat or ())}")
    return replace(config, plan=section)


def with_numbers(config: Config, numbers: Sequence[str]) -> Config:
    """The config with the blocks that the planner keeps whole, by their numbers."""
    kept = tuple(int(number) for number in numbers)
    say(f"plait: keep_gathered on {config.cluster.name}: {kept_text(kept)}")
    return with_kept(config, kept)


def with_kept(config: Config, keep: KeepGathered) -> Config:
    """The config with the blocks that zero3 keeps whole."""
    section = config.plan.model_validate({**config.plan.as_dict(), "keep_gathered": keep})
    return replace(config, plan=section)
