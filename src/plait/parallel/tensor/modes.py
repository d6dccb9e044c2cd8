"""The mode of a tensor axis, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from plait.parallel.tensor.grids import grid
from plait.parallel.tensor.group import TensorGroup
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.one_d import one_d


def mode_of(group: TensorGroup, roles: Mapping[str, str]) -> Mode:
    """The mode of a group, for a model with these roles."""
    if group.mode == "1d":
        return one_d(group, has_sequence="embedding" in roles.values())
    return grid(group)
