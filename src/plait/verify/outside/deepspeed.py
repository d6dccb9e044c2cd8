"""Whole gradients and parameters out of DeepSpeed's shards, when its inner optimizer updates.

ZeRO lays parameters end to end in flat masters, of which each rank owns a part. Its torch optimizer
sees the parts alone. They are put together by DeepSpeed's own reader of optimizer states, to which
the gradient is one more state. Reducing, dividing and clipping have happened by then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait.errors import ConfigError
from plait.values import PyTree

ENGINE = "deepspeed.runtime.engine"
ZERO = {
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
}
GRADIENT = "plait_gradient"


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether ZeRO holds the parameter in flat masters."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def whole_parameter(parameter: nn.Parameter) -> Tensor | None:
    """The whole value [...] of a parameter that ZeRO-3 has freed; None for another. Collective."""
    if not hasattr(parameter, "ds_id"):
        return None
    with sys.modules["deepspeed"].zero.GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)


class ZeroWatch:
    """The ZeRO optimizers that make updates while the watch is on."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have every step of a ZeRO optimizer noted; nothing where DeepSpeed is not loaded."""
        with ExitStack() as stack:
            for module, name in ZERO.items():
                if module in sys.modules:
                    kind = getattr(sys.modules[module], name)
                    stack.enter_context(patch.object(kind, "step", self._noting(kind.step)))
            yield

    def _noting(self, step: Any) -> Any:
        def noted(zero: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
            if not any(zero is one for one in self.found):
                self.found.append(zero)
            return step(zero, *args, **kwargs)

        return noted

    def gradients(
        self, optimizer: Optimizer, live: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[str, Mapping[str, PyTree], Tensor]]:
        """(name, group, whole gradient [...]) of every parameter that `optimizer` holds a part of.

        Collective: all ranks walk the parameters in ZeRO's order.
        """
        names = {id(parameter): name for name, parameter in live.items()}
        for zero in self.found:
            for flat, parameters in _flats(zero):
                group = _group_of(flat, optimizer)
                for parameter in parameters if group is not None else ():
                    name = names.get(id(parameter))
                    if name is not None and group is not None:
                        _check_precision(flat, parameter)
                        yield name, group, _gradient(zero, flat, parameter)

    def norms(self) -> list[tuple[float, float]]:
        """(limit, norm) of each ZeRO optimizer that clips."""
        return [
            (float(zero.clip_grad), float(zero._global_grad_norm))
            for zero in self.found
            if zero.clip_grad > 0 and zero._global_grad_norm is not None
        ]


def _check_precision(flat: Tensor, parameter: nn.Parameter) -> None:
    if flat.dtype.itemsize < parameter.dtype.itemsize:
        raise ConfigError(
            f"DeepSpeed's ZeRO updates parameters of {parameter.dtype} in {flat.dtype}: judge it "
            "with --dtype float32 (dtype='float32' of plait_parity)"
        )


def _flats(zero: Any) -> list[tuple[Tensor, list[nn.Parameter]]]:
    """Each flat master with the parameters that lie in it, over all ranks."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
    return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))


def _group_of(flat: Tensor, optimizer: Optimizer) -> Mapping[str, PyTree] | None:
    for group in optimizer.param_groups:
        if any(parameter is flat for parameter in group["params"]):
            return group
    return None


def _gradient(zero: Any, flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """The gradient in the masters' precision, on the host."""
    state = zero.optimizer.state
    fresh = flat not in state
    assert flat.grad is not None
    mapping = getattr(parameter, "_hp_mapping", None)
    try:
        state[flat][GRADIENT] = flat.grad
        if mapping is not None:
            place = mapping.hp_fragment_address
            part = flat.grad.narrow(0, place.start, place.numel)
            mapping.optim_fragment = {**(mapping.optim_fragment or {}), GRADIENT: part}
        read = sys.modules["deepspeed.utils"].safe_get_full_optimizer_state
        whole: Tensor = read(parameter, GRADIENT)
        return whole.to("cpu", copy=True)
    finally:
        state[flat].pop(GRADIENT)
        if fresh:
            del state[flat]
        if mapping is not None:
            mapping.optim_fragment.pop(GRADIENT)
