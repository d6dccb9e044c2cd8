"""Compute of one block on one rank: the record that every kind of machine fills."""

from __future__ import annotations

from dataclasses import dataclass

from plait.predict.cost.model.operations import Attention, Elementwise, Matmul, Operation


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds of one block, one micro-batch: forward, the two halves of backward, and what
    recomputation repeats.
    """

    forward: float
    input_grad: float
    weight_grad: float
    attention: float
    """The part of forward inside attention cores."""
    full: float
    """Seconds that full recomputation repeats inside backward."""
    selective: float
    """Seconds that selective recomputation repeats: see
    `plait.predict.cost.memory.rank_memory.block_activations`.
    """
    launches_forward: float = 0.0
    launches_backward: float = 0.0
    """Kernels that the host has to start."""


def launches(op: Operation, compiled: bool) -> tuple[float, float]:
    """Kernels forward and backward of one operation; an elementwise one is several when it is not
    fused.
    """
    if isinstance(op, Matmul):
        return 1.0, 2.0
    if isinstance(op, Attention):
        return (2.0, 3.0) if op.fused else (6.0, 12.0)
    if isinstance(op, Elementwise):
        return (1.0, 1.0) if compiled else (3.0, 4.0)
    return 1.0, 1.0
