"""The mode of a tensor axis, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.errors import NotAvailable
from plait.parallel.tensor.grids import grid
from plait.parallel.tensor.group import TensorGroup
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.one_d import one_d
from plait.parallel.tensor.roles import WHOLE_STREAM, word_of


def mode_of(group: TensorGroup, roles: Mapping[str, str]) -> Mode:
    """The mode of a group, for a model with these roles.

    Raises `NotAvailable` for a grid, where roles count on activations that are whole.
    """
    if any(word_of(role) in WHOLE_STREAM for role in roles.values()):
        if group.mode != "1d":
            raise NotAvailable(
                f"{group} cuts the activations between layers, and this model's table of roles "
                "keeps them whole; take tpN, or give a table"
            )
        group = replace(group, sequence_parallel=False)
    if group.mode == "1d":
        return one_d(group, has_sequence="embedding" in roles.values())
    return grid(group)
