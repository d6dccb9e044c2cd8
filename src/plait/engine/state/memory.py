"""The memory of a rank's model state, measured from the tensors that live now."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.engine.stages.timing import UpdateTiming
from plait.engine.state.training import TrainingState

_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def live_bytes(state: TrainingState, timing: UpdateTiming) -> dict[str, int]:
    """Bytes by kind; memory that several tensors share is counted once."""
    tensors = state.strategy.live_tensors()
    owned = {id(tensor) for kind in tensors.values() for tensor in kind}
    moments = [
        tensor
        for values in state.update.optimizer.state.values()
        for tensor in (values.values() if isinstance(values, Mapping) else [values])
        if isinstance(tensor, Tensor) and id(tensor) not in owned
    ]
    frozen = [param for param in state.holding.params.values() if not param.requires_grad]
    groups = {
        "parameters": [*tensors.get("parameters", ()), *frozen, *timing.older_weights()],
        "gradients": [*tensors.get("gradients", ())],
        "optimizer": [
            *tensors.get("optimizer", ()),
            *moments,
            *state.driver.live_tensors(),
        ],
        "buffers": [*tensors.get("buffers", ()), *state.model.buffers()],
    }
    seen: set[int] = set()
    num_bytes = dict.fromkeys(groups, 0)
    for kind, group in groups.items():
        num_bytes[kind] = sum(_new_bytes(part, seen) for one in group for part in _parts(one))
    return num_bytes


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the memory of one: itself, or indices and values of a sparse one."""
    names = _SPARSE_PARTS.get(tensor.layout)
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    """The bytes of a tensor's elements, 0 if its first element has been counted before or has no
    memory.
    """
    if tensor.untyped_storage().nbytes() == 0 or tensor.data_ptr() in seen:
        return 0
    seen.add(tensor.data_ptr())
    return tensor.numel() * tensor.element_size()
