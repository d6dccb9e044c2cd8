"""Data of a run in which one rank commits a fault at one step.

It is named in a config by `python = "tests.fault.faulty:data"`.

The variable PLANTED holds the fault as JSON: kind, rank, step. Ranks of the same world are healthy.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from plait.comm.axis import Axis
from plait.comm.work import Work
from plait.engine.engine import Engine
from plait.engine.group_counts import GroupCounts

FOREVER_SECONDS = 10_000
SLOW_SECONDS = 0.08
SEQ_LEN = 8
VOCAB_SIZE = 64
NUM_SAMPLES = 4096

state = {"step": 0, "done": False}
_lock = threading.Lock()


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, each sample by its own seed."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fault = planted()
        if fault is not None and is_due(fault, "blocking loader", ahead=True):
            wait_for_a_batch()
        if fault is not None and is_slow(fault, "slow loader"):
            time.sleep(SLOW_SECONDS / 4)
        seeded = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB_SIZE, (SEQ_LEN + 1,), generator=seeded)
        return tokens[:-1], tokens[1:]


def data() -> Dataset[tuple[Tensor, Tensor]]:
    """The data set; plants the fault in the rank that commits it."""
    if planted() is not None and not state["done"] and not hasattr(Engine.step, "__wrapped__"):
        plant()
    return Tokens()


def planted() -> dict[str, Any] | None:
    """The fault of this process, if it has one."""
    fault = json.loads(os.environ.get("PLANTED", "{}"))
    return fault if os.environ.get("RANK") == str(fault.get("rank")) else None


def is_due(fault: dict[str, Any], kind: str, *, ahead: bool = False) -> bool:
    """Whether a fault that happens once is to happen now; `ahead` is asked before its step."""
    reached = state["step"] + ahead >= fault["step"]
    if fault["kind"] != kind or state["done"] or not reached:
        return False
    state["done"] = True
    return True


def is_slow(fault: dict[str, Any], kind: str) -> bool:
    """Whether a fault that lasts has begun."""
    return bool(fault["kind"] == kind and state["step"] >= fault["step"])


def wait_for_a_batch() -> None:
    time.sleep(FOREVER_SECONDS)


def hold_interpreter() -> None:
    """Read from a pipe that nobody writes to, in a call that does not let the interpreter go.

    A signal does not end such a read, as it would a sleep.
    """
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def loop_without_end() -> None:
    while True:
        pass


def wait_for_lock() -> None:
    _lock.acquire()
    _lock.acquire()


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_child() -> None:
    subprocess.run(["sleep", str(FOREVER_SECONDS)], check=False)


def read_pipe() -> None:
    os.read(os.pipe()[0], 1)


def wait_for_event() -> None:
    threading.Event().wait()


FORWARD: dict[str, Callable[[], None]] = {
    "held GIL": hold_interpreter,
    "endless loop": loop_without_end,
    "lock": wait_for_lock,
    "stopped process": stop_process,
    "child process": wait_for_child,
    "silent pipe": read_pipe,
}


def plant() -> None:
    """Put the fault of this process in its place."""
    fault = planted()
    assert fault is not None
    _count_steps()
    nn.modules.module.register_module_forward_pre_hook(functools.partial(_before_module, fault))
    _wrap_collective(fault)
    _wrap_update(fault)


def _count_steps() -> None:
    step = Engine.step

    @functools.wraps(step)
    def counted(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        state["step"] = engine.step_index + 1
        return step(engine, *args, **kwargs)

    Engine.step = counted  # type: ignore[method-assign]


def _before_module(fault: dict[str, Any], module: nn.Module, args: Any) -> None:
    for kind, act in FORWARD.items():
        if is_due(fault, kind):
            act()
    if is_linear(module):
        slow_down(fault)
        if args and args[0].requires_grad and is_due(fault, "blocked backward"):
            args[0].register_hook(lambda grad: wait_for_event())
    damage(fault, module)


def slow_down(fault: dict[str, Any]) -> None:
    if is_slow(fault, "slow computing"):
        end = time.thread_time() + SLOW_SECONDS / 8  # work, however busy the machine is
        while time.thread_time() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)
    if is_slow(fault, "sleeping"):
        time.sleep(SLOW_SECONDS / 8)
    if is_slow(fault, "memory pressure"):
        end = time.thread_time() + SLOW_SECONDS / 8
        while time.thread_time() < end:
            torch.empty(48 << 20, dtype=torch.uint8)[::4096] = 1


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, whole or a rank's part of one."""
    return "Linear" in type(module).__name__ and weight_of(module) is not None


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight of a module as it lies there: under ZeRO-3 `module.weight` would gather it, on
    this rank alone.
    """
    return module._parameters.get("weight")


def damage(fault: dict[str, Any], module: nn.Module) -> None:
    """Change the weights of a linear layer in place, where it holds them now."""
    weight = weight_of(module)
    if not is_linear(module) or weight is None or not weight.untyped_storage().nbytes():
        return
    with torch.no_grad():
        if is_due(fault, "flipped bit"):
            bits = weight.view(-1).view(torch.int32)
            bits[fault.get("element", 5)] ^= 1 << fault.get("bit", 20)
        if is_due(fault, "NaN weight"):
            weight.view(-1)[3] = float("nan")
        if is_due(fault, "infinite weight"):
            weight.view(-1)[3] = float("inf")
        is_head = weight.shape[0] == VOCAB_SIZE
        if is_head and is_due(fault, "spike"):
            weight.mul_(1e3)


def _wrap_collective(fault: dict[str, Any]) -> None:
    reduce, gather = Axis.all_reduce, Axis.all_gather

    def reduced(axis: Axis, tensor: Tensor, *args: Any, **kwargs: Any) -> Work:
        if axis.size > 1 and is_due(fault, "skipped collective"):
            return Work(None, axis._label("all_reduce", 0), axis._recorder)
        if axis.size > 1 and is_due(fault, "mismatched size"):
            tensor = torch.cat([tensor.reshape(-1)] * 2)
        if axis.size > 1 and is_slow(fault, "slow link"):
            return _slowly(lambda: reduce(axis, tensor, *args, **kwargs), axis)
        return reduce(axis, tensor, *args, **kwargs)

    def gathered(axis: Axis, *args: Any, **kwargs: Any) -> Work:
        if axis.size > 1 and is_due(fault, "skipped collective"):
            return Work(None, axis._label("all_gather", 0), axis._recorder)
        return gather(axis, *args, **kwargs)

    Axis.all_reduce = reduced  # type: ignore[method-assign]
    Axis.all_gather = gathered  # type: ignore[method-assign]


def _wrap_update(fault: dict[str, Any]) -> None:
    """The engine is built before its data, so that its update is bound already."""
    step = GroupCounts.step

    @functools.wraps(step)
    def stepped(counts: GroupCounts) -> None:
        step(counts)
        if is_due(fault, "wrong update"):
            largest = max(counts._optimizer.param_groups[0]["params"], key=Tensor.numel)
            with torch.no_grad():
                largest.view(-1).view(torch.int32)[fault["element"]] ^= 1 << fault["bit"]

    GroupCounts.step = stepped  # type: ignore[method-assign]


def _slowly(act: Callable[[], Work], axis: Axis) -> Work:
    """An operation whose transport takes long to take it over."""
    backend = axis._backend
    assert backend is not None
    original = type(backend).all_reduce

    def late(self: Any, tensor: Tensor) -> Any:
        time.sleep(SLOW_SECONDS)
        return original(self, tensor)

    backend.all_reduce = functools.partial(late, backend)  # type: ignore[method-assign]
    try:
        return act()
    finally:
        del backend.all_reduce  # type: ignore[method-assign]
