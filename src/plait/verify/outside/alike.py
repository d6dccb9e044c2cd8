"""Whether `make()` gives every rank the same model and batches, and a model that has values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.errors import ConfigError
from plait.verify.diagnosis.finding import Finding
from plait.verify.outside.task import Made

Marks = tuple[str, str]
"""A mark of the model's values and one of the batches."""


def check_values(model: nn.Module) -> None:
    """Raise `ConfigError` for parameters on the meta device, which have no values to compare."""
    names = [name for name, one in model.named_parameters() if one.is_meta]
    if names:
        raise ConfigError(
            f"make() returned a model whose parameter '{names[0]}' is on the meta device and has "
            "no values: make it on the cpu, and move it in prepare(model)"
        )


def marks_of(made: Made) -> Marks:
    """The marks of what this rank has made."""
    return _mark(made.model.parameters()), _mark(tree_leaves(list(made.given)))


def differently_made(ranks: Sequence[Marks]) -> list[Finding]:
    """The finding where ranks begin with different values; none where they are alike."""
    for place, what in enumerate(("values of the model", "batches")):
        odd = [rank for rank, marks in enumerate(ranks) if marks[place] != ranks[0][place]]
        if odd:
            listed = ", ".join(str(rank) for rank in odd)
            text = (
                f"make() gives rank {listed} other {what} than rank 0: seed it alike on every "
                "rank, by torch.manual_seed(0) in its first line"
            )
            return [Finding("make", "", text, 0.99)]
    return []


def _mark(leaves: Iterable[object]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().reshape(-1)
            wide = values.double() if values.is_floating_point() else values.long()
            digest.update(wide.contiguous().numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
