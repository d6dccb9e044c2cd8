"""`[adapter]`: what is trained beside a frozen model, and how that is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from plait.config.model import Count, PathText, Positive, Section, as_tuple


class AdapterConfig(Section):
    """Low-rank adapters on a frozen model."""

    kind: Literal["lora", "dora"] | None = None
    """The kind of adapter; without it the whole model is trained."""
    rank: Count = 8
    """The rank of the two matrices."""
    alpha: Positive | None = None
    """The scale of an adapter is alpha / rank; by default it is 1."""
    targets: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = None
    """Names or patterns of linear layers or packed experts; all linear but the output without."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The probability of dropout before an adapter."""
    weights: PathText | None = None
    """A folder of PEFT's files to start from."""
    base: Literal["none", "int8", "nf4"] = "none"
    """How frozen linear layers are kept: as they are, or in 8 or 4 bits (bitsandbytes)."""
