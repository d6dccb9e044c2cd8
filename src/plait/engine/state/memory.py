"""The memory of a rank's model state, measured from the tensors that live now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from plait.engine.stages.delayed import memory_of

if TYPE_CHECKING:
    from plait.engine.engine import Engine


def live_bytes(engine: Engine) -> dict[str, int]:
    """Measured from the tensors that live now; memory that several tensors share is counted
    once.
    """
    tensors = engine.strategy.live_tensors()
    owned = {id(tensor) for kind in tensors.values() for tensor in kind}
    state = [
        tensor
        for values in engine.update.optimizer.state.values()
        for tensor in values.values()
        if isinstance(tensor, Tensor) and id(tensor) not in owned
    ]
    frozen = [param for param in engine.holding.params.values() if not param.requires_grad]
    groups = {
        "parameters": [*tensors.get("parameters", ()), *frozen, *memory_of(engine._delayed)],
        "gradients": [*tensors.get("gradients", ())],
        "optimizer": [*tensors.get("optimizer", ()), *state, *engine.driver.live_tensors()],
        "buffers": [*tensors.get("buffers", ()), *engine.model.buffers()],
    }
    seen: set[int] = set()
    return {
        kind: sum(_new_bytes(tensor, seen) for tensor in group) for kind, group in groups.items()
    }


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    """The bytes of a tensor's elements, 0 if its first element has been counted before or has no
    memory.
    """
    if tensor.untyped_storage().nbytes() == 0 or tensor.data_ptr() in seen:
        return 0
    seen.add(tensor.data_ptr())
    return tensor.numel() * tensor.element_size()
