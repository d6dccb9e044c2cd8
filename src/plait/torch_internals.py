"""The private functions of torch that a new version may rename, with a test each, in one place.

Where one is gone, this file and its test are where to look.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from plait.imports import when_loaded

_optimizer: Any = sys.modules["torch.optim.optimizer"]  # torch.optim takes the name away

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


_NOTHING: AbstractContextManager[object] = nullcontext()


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory that a tensor [...] is in; a resize leaves it as it is."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def has_dispatch_modes() -> bool:
    """Whether a dispatch mode of torch sees what is done now."""
    return bool(torch._C._len_torch_dispatch_stack())


def no_dispatch_modes() -> AbstractContextManager[object]:
    """A context whose operations torch's dispatch modes do not see."""
    if not has_dispatch_modes():
        return _NOTHING
    hidden: AbstractContextManager[object] = _disable_current_modes()
    return hidden


def is_recorded() -> bool:
    """Whether a CUDA graph is recorded, of what this thread asks."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_function_transforms() -> bool:
    """Whether a transform of `torch.func` (grad, vmap) is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


_STANCE_LOCK = threading.Lock()
_STANCE = ExitStack()
_WITHOUT: list[int] = []  # the threads within `without_compiling`


@contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which compiled functions run as they were written.

    A process that has not loaded the compiler does not load it for this. One that loads it inside
    runs functions as they were written, too. The stance of torch is one for the process: the last
    of several threads restores it.
    """
    with _STANCE_LOCK:
        compiler = sys.modules.get(_COMPILER)
        if compiler is None or getattr(compiler.__spec__, "_initializing", False):
            _await_compiler()
        elif not _WITHOUT:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _WITHOUT.append(threading.get_ident())
    try:
        yield
    finally:
        with _STANCE_LOCK:
            _WITHOUT.remove(threading.get_ident())
            if not _WITHOUT:
                _STANCE.close()


@functools.cache
def _await_compiler() -> None:
    """Have a compiler that is loaded inside of `without_compiling` keep out, too."""

    def keep_out() -> None:
        with _STANCE_LOCK:
            if _WITHOUT:
                _STANCE.enter_context(torch.compiler.set_stance("force_eager"))

    when_loaded(_COMPILER, keep_out)


_COMPILER = "torch._dynamo"
_CALLBACKS = "torch._dynamo.callback"


def on_compile(begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Have functions called when torch's compiler begins and ends; nothing where it has changed.

    A process that has not loaded the compiler does not load it for this.
    """

    def ask() -> None:
        handler = getattr(sys.modules[_CALLBACKS], "callback_handler", None)
        if handler is not None:
            handler.register_start_callback(lambda about: begin())
            handler.register_end_callback(lambda about: end())

    when_loaded(_CALLBACKS, ask)


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Numbers [n] on a device. The host does not wait for what a GPU was asked before."""
    on_host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor [...] on a device. The host does not wait for what a GPU was asked before.

    A tensor in pinned memory is read later: it must not be written meanwhile.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def place_state(value: Tensor, param: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """A tensor [...] of an optimizer's state, where the optimizer keeps it.

    A count of steps stays on the host, unless the update is fused or capturable. All else lies with
    the parameter [...].
    """
    on_device = any(one.get("fused") or one.get("capturable") for one in optimizer.param_groups)
    return value.to(param.device) if value.dim() or on_device else value.cpu()


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimizer. It does not load torch's compiler, unless it is loaded.

    Loading takes a second, and torch's own step does it to say that it is not to be traced.
    """
    plain = None if _COMPILER in sys.modules else _plain_step(optimizer)
    if plain is None:
        optimizer.step()
        return
    kind = type(optimizer).__name__
    with (
        torch.autograd.profiler.record_function(f"Optimizer.step#{kind}.step"),
        torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable"))),
    ):
        plain(optimizer)


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., object] | None:
    """The rule of one of torch's own optimizers, without its two wrappers.

    One of these runs hooks; the other loads the compiler, to tell it not to trace. None where the
    optimizer is another's, or has hooks, or has changed. A guard (`is_guard`) is no such hook.
    """
    kind: Any = type(optimizer)
    hooks = (
        *_optimizer._global_optimizer_pre_hooks,
        *_optimizer._global_optimizer_post_hooks,
        *step_hooks(optimizer),
    )
    hooked = kind.step
    is_own = kind.__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    if hooks or not is_own or not getattr(hooked, "hooked", False):
        return None
    without_grad = hooked.__wrapped__
    if without_grad.__code__.co_name != "_use_grad":
        return None
    plain: Callable[..., object] = without_grad.__wrapped__
    return plain


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., object]]:
    """The hooks that run before and after a step of this optimizer, without guards (`is_guard`)."""
    before = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    after = getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
    return [one for one in (*before, *after) if not getattr(one, "is_guard", False)]


def tell_schedulers_of_step(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer count as stepped, though its update comes later or elsewhere.

    torch's schedulers warn of an optimizer that was not.
    """
    asked: Any = optimizer
    asked._opt_called = True


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer is torch's own rule alone: no hook, no step put over it."""
    return _plain_step(optimizer) is not None


def allow_any_grad_dtype(param: torch.nn.Parameter) -> None:
    """Let the gradient of a parameter [...] have another precision than its own."""
    tensor: Any = param
    tensor.grad_dtype = None


def without_talk_of_kernels() -> None:
    """Have torchao be silent about kernels for other devices when it is imported.

    transformers imports it with a model wherever it is installed.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def storage_key(tensor: Tensor) -> int:
    """A number that tensors [...] on one storage share, for as long as the storage lives. A tensor
    without a storage, as a sparse one, has its own.
    """
    if not has_storage(tensor):
        return -id(tensor)
    key: int = tensor.untyped_storage()._cdata
    return key


def has_storage(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor [...] lie in one storage, as those of sparse ones do not."""
    return bool(torch._C._has_storage(tensor))


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module that `torch.compile` was given; itself where it is not compiled."""
    original = getattr(function, "_orig_mod", None)
    if original is None:
        original = getattr(function, "_torchdynamo_orig_callable", None)
    return function if original is None else original


def foreign_hooks(tensor: Tensor) -> list[object]:
    """The code that waits for the gradient of a tensor [...] and is not plait's."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    hooks = [*(tensor._backward_hooks or {}).values(), *(after or {}).values()]
    return [hook for hook in hooks if not is_of_plait(hook)]


def is_of_plait(hook: object) -> bool:
    """Whether plait has set a hook itself."""
    return str(getattr(hook, "__module__", "")).startswith("plait.")


def in_autograd_function() -> bool:
    """Whether this runs in an `autograd.Function`, whose backward may call modules again."""
    apply: Any = torch.autograd.Function.apply
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not apply.__func__.__code__:
        frame = frame.f_back
    return frame is not None


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
    """The nearest orthogonal matrix [rows, columns], nearly: Muon's five steps of Newton-Schulz, in
    bf16.
    """
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
    generator_name = "_checkpoint_without_reentrant_generator"
    if hasattr(_checkpoint, f"{generator_name}_impl"):  # torch 2.14 calls this one
        generator_name += "_impl"
    original = getattr(_checkpoint, generator_name)

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not is_taken():
            return plainly(function, preserve, *args)
        with around():
            return function(*args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        return alone() if is_taken() else original(*args, **kwargs)

    def alone() -> Iterator[None]:
        with around():
            yield

    members: Any = _checkpoint
    members.CheckpointFunction.apply = apply
    members.CheckpointFunction._plait_asks = True
    setattr(_checkpoint, generator_name, generator)


@contextmanager
def whole_or_none() -> Iterator[None]:
    """Have torch forget the first process group where its making fails inside.

    Torch keeps a group whose ranks did not all come, and goes on counting. The next group of this
    process then has another name than that of its peers, and they never meet.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    try:
        yield
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        distributed_c10d._world.group_count = 0
        raise


def has_hooks_that_always_run(module: nn.Module) -> bool:
    """Whether a module, or one in it, has hooks that run even after a forward that raised.

    Torch calls them after an `Exception`, and after no other `BaseException`.
    """
    return any(one._forward_hooks_always_called for one in module.modules())


class _RecomputedError(BaseException):
    """No error: torch has recomputed what a backward needs."""


def stop_past_exceptions() -> None:
    """Have torch end recomputations by what no `except Exception` of a model catches."""
    members: Any = _checkpoint
    members._StopRecomputationError = _RecomputedError


def places_written(op: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[int]:
    """The storages, as `storage_key` names them, that an operation of torch writes into."""
    schema = getattr(op, "_schema", None)  # an operator of higher order has none
    for at, argument in enumerate(schema.arguments if schema and schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else named.get(argument.name)
            yield from (storage_key(one) for one in tree_leaves(given) if isinstance(one, Tensor))


def forget_written(again: object, places: Container[int]) -> None:
    """Have a selective recomputation compute the kept tensors again that were written into.

    `again` is torch's context of the second run, which refuses such a tensor itself where its
    version says so. `places` are storages in which other views of one were written.
    """
    repeated = getattr(_checkpoint, "_RECOMPUTE", None)
    kept = getattr(again, "storage", None)
    if repeated is None or kept is None:
        return
    for calls in kept.values():
        for at, entry in calls.items():
            leaves = tree_leaves(entry)
            kept_here = [one for one in leaves if isinstance(getattr(one, "val", 0), Tensor)]
            moved = any(one.val._version != one.version for one in kept_here)
            if moved or any(storage_key(one.val) in places for one in kept_here):
                calls[at] = repeated
