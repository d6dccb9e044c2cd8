"""The private functions of torch that plait uses: all of them, with a test each, in one place.

A new version of torch may rename them; then this file and its test are where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import _disable_current_modes

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

_NOTHING: AbstractContextManager[object] = nullcontext()


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode of torch sees what is done now."""
    return bool(torch._C._len_torch_dispatch_stack())


def no_dispatch_modes() -> AbstractContextManager[object]:
    """A context whose operations torch's dispatch modes do not see."""
    if not has_dispatch_modes():
        return _NOTHING
    hidden: AbstractContextManager[object] = _disable_current_modes()
    return hidden


def has_function_transforms() -> bool:
    """Whether a transform of `torch.func` (grad, vmap) is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def on_compile(begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Have functions called when torch's compiler begins and ends; nothing where it has changed."""
    from torch._dynamo import callback

    handler = getattr(callback, "callback_handler", None)
    if handler is not None:
        handler.register_start_callback(lambda about: begin())
        handler.register_end_callback(lambda about: end())


def storage_key(tensor: Tensor) -> int:
    """A number that tensors on one storage share, for as long as the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def takes_gradient_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel divides gradients by a scale itself (fused ones do)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def onednn_linear() -> Any:
    """The oneDNN product of a linear layer, which compiled models use; None where torch was built
    without.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, nearly: Muon's five steps of Newton-Schulz, in bf16."""
    from torch.optim import _muon

    factors = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    steps = _muon.DEFAULT_NS_STEPS
    made: Tensor = _muon._zeropower_via_newtonschulz(matrix, factors, steps, _muon.EPS)
    return made


def on_checkpoint(
    is_taken: Callable[[], bool], around: Callable[[], AbstractContextManager[object]]
) -> None:
    """Have `torch.utils.checkpoint.checkpoint` run its function alone within `around()`, where
    `is_taken()`; asked once for a process.
    """
    if getattr(_checkpoint.CheckpointFunction, "_plait_asks", False):
        return
    plainly = _checkpoint.CheckpointFunction.apply
    anew = _checkpoint._checkpoint_without_reentrant_generator

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not is_taken():
            return plainly(function, preserve, *args)
        with around():
            return function(*args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        return alone() if is_taken() else anew(*args, **kwargs)

    def alone() -> Iterator[None]:
        with around():
            yield

    members: Any = _checkpoint
    members.CheckpointFunction.apply = apply
    members.CheckpointFunction._plait_asks = True
    members._checkpoint_without_reentrant_generator = generator
