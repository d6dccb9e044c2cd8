"""The mode of a tensor axis, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.parallel.tensor.grids import grid
from plait.parallel.tensor.group import TensorGroup
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.one_d import one_d
from plait.parallel.tensor.roles import WHOLE_STREAM, word_of
from plait.parallel.tensor.whole_features import whole_features


def mode_of(group: TensorGroup, roles: Mapping[str, str]) -> Mode:
    """The mode of a group, for a model with these roles."""
    is_whole = any(word_of(role) in WHOLE_STREAM for role in roles.values())
    if group.mode != "1d":
        return whole_features(group) if is_whole else grid(group)
    if is_whole:
        group = replace(group, sequence_parallel=False)
    return one_d(group, has_sequence="embedding" in roles.values())
