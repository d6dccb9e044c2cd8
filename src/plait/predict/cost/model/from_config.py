"""The description of a model that a config makes by code. It is made on the meta device, and run
there on a sample of its data.

That is a user's own function (`python = "module:function"`), and what plait has no formulae for.
Everything here loads torch, and only when it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError
from plait.predict.cost.model.modules import SAMPLES, arguments_of, describe_by_running
from plait.predict.cost.model.operations import Model
from plait.values import JsonMapping, PyTree

if TYPE_CHECKING:
    from torch import nn

BY_RUNNING = frozenset({"fno"})
"""Models of plait's own that have no formulae here."""
RANKS = 2
"""Ranks of the tensor axis for which roles are found; a description is of no plan."""


def is_made(model: Mapping[str, object]) -> bool:
    """Whether a `[model]` table names code rather than sizes."""
    return bool(model.get("python")) or model.get("name") in BY_RUNNING


_known: ContextVar[dict[str, Model] | None] = ContextVar("_known", default=None)


@contextlib.contextmanager
def described_once() -> Iterator[None]:
    """While it lasts, equal tables are described once: a command asks for them several times."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def describe_made(model: JsonMapping, data: JsonMapping, seq_len: int) -> Model:
    """The description of the model that a `[model]` table makes, of samples as its `[data]` table
    gives them.

    Raises `ModelError` for a function that fails or a model that cannot run on the meta device.
    """
    known = _known.get()
    if known is None:
        return _describe(model, data, seq_len)
    key = repr((model, data, seq_len))
    if key not in known:
        known[key] = _describe(model, data, seq_len)
    return known[key]


def _describe(model: JsonMapping, data: JsonMapping, seq_len: int) -> Model:
    import torch

    from plait.models import has_roles, make, user

    keys = {key: value for key, value in model.items() if key not in ("roles", "arguments")}
    with torch.device("meta"):
        by_name = "python" not in keys
        made = (
            make(keys.pop("name"), **keys)
            if by_name
            else user.make(keys["python"], model.get("arguments"))
        )
    example = _sample(data, model)
    roles = model.get("roles")
    if roles is None and example is not None and not has_roles(made):
        roles = _followed_roles(made, example)
    return describe_by_running(made, seq_len or _positions(example), roles, example=example)


def _positions(example: PyTree) -> int:
    """The tokens of a sample, as a run counts them: the positions of a sequence of integers."""
    import torch

    for leaf in torch.utils._pytree.tree_leaves(example):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and not leaf.is_floating_point():
            return int(leaf.shape[1])
    return 1


def _followed_roles(made: nn.Module, example: PyTree) -> Mapping[str, str]:
    """The roles that a forward on the meta device shows, as `plait train` finds them by one on the
    host. A forward that needs values leaves all layers whole.
    """
    import torch

    from plait.models.derived.table import derive_or_leave

    positional, named = arguments_of(example)
    with torch.device("meta"):
        return derive_or_leave(made, lambda: made(*positional, **named), RANKS).roles


def _sample(data: JsonMapping, model: JsonMapping) -> Any:
    """The inputs of the first sample, as a batch of `SAMPLES` on the meta device. None where there
    are no data.
    """
    import torch

    from plait.datasets import make

    try:
        inputs = make(data, model)[0][0]
    except (PlaitError, LookupError):
        return None
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda leaf: torch.empty((SAMPLES, *leaf.shape), dtype=leaf.dtype, device="meta"),
        inputs,
    )
