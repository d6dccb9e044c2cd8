"""Rules of memory: an accelerator's own memory, or that of a process on a processor.

On a processor the peak of the whole process is measured, so more counts there. The process itself
counts, gradients of the block at work, and products of experts, which are products like others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from plait.plan import Plan
from plait.predict.cost.model.operations import LARGE_LOGITS, LARGE_LOGITS_OF_PROCESSORS

PROCESS_BYTES = 1.5e9
"""Context, kernels and library workspaces of a process on an accelerator, outside the allocator."""

PROCESS_BYTES_CPU = 325e6
"""Resident memory of a process with torch loaded. A processor has no other memory to measure, so it
is part of the peak.
"""

COMMUNICATOR_BYTES = 0.5e9
"""Buffers of the collectives of one axis, outside the allocator."""


@dataclass(frozen=True, eq=False)
class MemoryRules(ABC):
    """Memory of one rank: how much there is, and what counts. Compared by identity."""

    total_bytes: float
    process_bytes: float = 0.0
    """Bytes of a process before it holds any model, where they are part of what is measured."""

    share: float = 1.0
    """The part of the room that a model may take; below 1 it leaves a margin for what is not
    predicted.
    """

    fragmentation: ClassVar[float]
    """Bytes that an allocator reserves beyond what lives, as a fraction of activations."""
    fragments_working: ClassVar[bool]
    """Whether the block at work fragments memory as well."""
    keeps_block_gradients: ClassVar[bool]
    """Whether gradients of the block at work count beside its activations."""
    keeps_expert_products: ClassVar[bool]
    """Whether selective recomputation keeps the products of experts."""
    is_host: ClassVar[bool]
    """Whether it is the host's own memory, so that nothing can be moved there."""
    large_logits: ClassVar[int]
    """Logits beyond which plait's loss makes no float32 copy of them."""

    def usable_bytes(self, plan: Plan) -> float:
        """The part of a rank's room that a model may take."""
        return self.room_bytes(plan) * self.share

    @abstractmethod
    def room_bytes(self, plan: Plan) -> float:
        """Room of a rank for a model, once the process and its communicators have theirs."""

    @abstractmethod
    def placed(self, plan: Plan) -> Plan:
        """The plan as this memory runs it."""


class DeviceMemory(MemoryRules):
    """Memory of an accelerator, apart from its host's."""

    fragmentation = 0.11
    """The median of 22 public logs of torch's allocator (`benchmarks.planner.parts`)."""
    fragments_working = False
    keeps_block_gradients = False
    keeps_expert_products = False
    is_host = False
    large_logits = LARGE_LOGITS

    def room_bytes(self, plan: Plan) -> float:
        """All but the process and the buffers of each axis."""
        sizes = (plan.dp.size * plan.cp.size, plan.tp.size, plan.pp.size, plan.ep)
        axes = sum(size > 1 for size in sizes)
        return self.total_bytes - PROCESS_BYTES - COMMUNICATOR_BYTES * axes

    def placed(self, plan: Plan) -> Plan:
        """The plan itself."""
        return plan


@dataclass(frozen=True, eq=False)
class ProcessMemory(MemoryRules):
    """Memory of a process on a processor; `cores` ranks have `total_bytes` each."""

    process_bytes: float = PROCESS_BYTES_CPU
    cores: int = 1

    fragmentation = 0.25
    """Freed memory is kept, and the peak is that of the whole process."""
    fragments_working = True
    keeps_block_gradients = True
    keeps_expert_products = True
    is_host = True
    large_logits = LARGE_LOGITS_OF_PROCESSORS

    def room_bytes(self, plan: Plan) -> float:
        """Share of a rank, less where more ranks than cores share the memory."""
        return self.total_bytes * min(1.0, self.cores / plan.world_size)

    def placed(self, plan: Plan) -> Plan:
        """The plan without offload: the memory is the host's own."""
        return replace(plan, dp=replace(plan.dp, offload=False)) if plan.dp.offload else plan


DEVICE = DeviceMemory(0.0)
"""Rules of accelerators where no size is asked about."""
