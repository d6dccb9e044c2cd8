"""2.5D: B. Wang et al., Tesseract: Parallelize the Tensor Parallelism Efficiently, section 3.

d layers of q x q ranks. X is cut into (d q) x q blocks, so each layer multiplies its own samples as
in 2D. A is cut into q x q blocks that every layer holds. Each layer's dA comes from its own
samples: the gradient is their sum over depth.
"""

from __future__ import annotations

from plait.parallel.tensor.group import TensorGroup
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.two_d import grid


def two_and_half_d(group: TensorGroup) -> Mode:
    """`tpN:2.5d,depthD`."""
    return grid(group, samples=("tp_depth", "tp_row"), partial=("tp_depth",))
