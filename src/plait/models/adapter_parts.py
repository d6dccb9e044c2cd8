"""Adapters before they hang on layers: their settings, and the modules of their matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from plait.errors import ModelError, nearest
from plait.models.coded import FORMATS
from plait.patterns import matches

KINDS = ("lora", "dora")
BASES = ("none", *FORMATS)
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""The children of a layer that are its adapter."""


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters of a model: the keys of `[adapter]`.

    `alpha` over `rank` is the scale; by default it is 1. `targets` are last names of layers, whole
    names or patterns; by default every linear layer but the output. Names of packed experts, or of
    their matrices, mean these. `weights` is a folder of PEFT's
    to start from. `base` is how the frozen weights of linear layers but the output are kept: as
    they are (`none`), or in codes of `models.coded`.
    """

    kind: str = "lora"
    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0
    weights: str | Path | None = None
    base: str = "none"

    @property
    def scale(self) -> float:
        """The factor of the product of an adapter's matrices B and A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self) -> None:
        """Raise `ModelError` for an unknown kind, a rank below 1 or a rate that is none."""
        if self.kind not in KINDS:
            raise ModelError(f"adapter.kind = {self.kind!r}; {nearest(str(self.kind), KINDS)}")
        if self.rank < 1:
            raise ModelError(
                f"adapter.rank = {self.rank}: an adapter has at least rank 1; 8 is usual"
            )
        if not 0 <= self.dropout < 1:
            raise ModelError(f"adapter.dropout = {self.dropout} must be from 0 to below 1")
        if self.alpha is not None and not self.alpha > 0:
            raise ModelError(f"adapter.alpha = {self.alpha} must be more than 0")
        if self.base not in BASES:
            raise ModelError(f"adapter.base = {self.base!r}; {nearest(str(self.base), BASES)}")
        if self.base != "none" and self.kind == "dora":
            raise ModelError(
                f"adapter.base = {self.base!r} goes with kind = 'lora': the magnitudes of dora are "
                "norms of weights in full; take lora, or base = 'none'"
            )


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer beside its matrices. `transposed`: the weight is [in, out].

    `base`: how the frozen weights of the layer's model are kept. `keys`: the parameters [E, ...] of
    packed experts that have matrices; empty for a linear layer.
    """

    kind: str
    rank: int
    scale: float
    dropout: float
    transposed: bool
    base: str = "none"
    keys: tuple[str, ...] = ()


class Zeros(nn.Linear):
    """A linear layer without bias that starts at zero."""

    def reset_parameters(self) -> None:
        """Zero the weight: an adapter changes nothing at first."""
        nn.init.zeros_(self.weight)


class Magnitude(nn.Module):
    """The norms of the rows of a weight, which DoRA trains."""

    def __init__(self, numel: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Ones, until the base weight is known."""
        nn.init.ones_(self.weight)


def means(target: str, name: str) -> bool:
    """Whether a target of `[adapter]` is the name of a layer, the end of it, or a pattern of it."""
    return name == target or name.endswith(f".{target}") or matches(target, name)


def has_adapter(module: nn.Module) -> bool:
    """Whether an adapter hangs on a layer. Other code may call something of its own `adapter`."""
    return isinstance(getattr(module, "adapter", None), Adapter)


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The matrices of a layer's adapter, by the name that the layer has for them.

    Those of packed experts are called as `lora_A.down_proj`.
    """
    for key, part in module.named_children():
        if key not in PARTS:
            continue
        if isinstance(part, nn.ModuleDict):
            yield from ((f"{key}.{name}", one) for name, one in part.items())
        else:
            yield key, part
