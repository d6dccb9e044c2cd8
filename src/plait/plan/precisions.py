"""The facts of every precision: one row each, which runs, memory, traffic and time read.

The precisions of eight bits and fewer are for prediction, and fp8 runs, too. Their scales and the
choice of products are those of NVIDIA's Transformer Engine. The linear layers of blocks multiply in
them, forward and both halves of backward. Embedding, head, router, attention and all that is kept
or sent stay bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

Messages = Literal["whole", "bf16"]
"""Whether activations travel as they are, or in two bytes a number."""
Precision = Literal["float32", "bf16", "float64", "fp8", "mxfp8", "nvfp4"]
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)


@dataclass(frozen=True)
class PrecisionFacts:
    """Bytes of a number that is kept or sent, and how products are computed.

    `has_masters`: the optimizer updates float32 copies. `working`: the precision of all but the
    rounded products. `rounded_bytes`: a factor of a rounded product, its share of the scales
    included; 0 where products are in the working precision. `rounded_layers`: the part of the
    layers that rounds. `amax_passes`: readings of a tensor that find its scale first.
    """

    num_bytes: int
    has_masters: bool = False
    working: str = ""
    rounded_bytes: float = 0.0
    rounded_layers: float = 1.0
    amax_passes: float = 0.0

    @property
    def rounds_products(self) -> bool:
        """Whether linear layers multiply in fewer bits than what is kept."""
        return self.rounded_bytes > 0


def _rounded(
    block: int, scale_bytes: float, bits: int, layers: float, passes: float
) -> PrecisionFacts:
    each = bits / 8 + (scale_bytes / block if block else 0.0)
    return PrecisionFacts(2, True, "bf16", each, layers, passes)


PRECISION: Final[Mapping[str, PrecisionFacts]] = MappingProxyType(
    {
        "float32": PrecisionFacts(4),
        "bf16": PrecisionFacts(2, True),
        "float64": PrecisionFacts(8),
        # One scale a tensor, of the tensor itself (current scaling), which is read for it first.
        "fp8": _rounded(0, 0.0, 8, 1.0, 1.0),
        # A scale of one byte for 32 numbers (OCP Microscaling 1.0), found where they are rounded.
        "mxfp8": _rounded(32, 1.0, 8, 1.0, 0.0),
        # A scale of one byte for 16 numbers and one for the tensor. 16 % of the layers stay bf16
        # ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149, 12B).
        "nvfp4": _rounded(16, 1.0, 4, 0.84, 1.0),
    }
)

PREDICTED: Final = tuple(name for name, facts in PRECISION.items() if facts.rounds_products)
"""The precisions of eight bits and fewer. Of these an engine computes in fp8 alone."""
DRIFTING: Final = ("bf16", "fp8")
"""The precisions of a run whose distance from float32 `plait verify` measures."""


def working(precision: str) -> str:
    """The precision of what a plan keeps, sends and does not round."""
    return PRECISION[precision].working or precision
