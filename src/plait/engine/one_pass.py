"""The update in one pass over memory, where masters are float32 and layers compute in bf16.

torch's fused AdamW takes gradients of the masters' precision alone. Before it a gradient in bf16 is
copied to float32, and after it the new masters are rounded to bf16. These three passes move 44
bytes a parameter. One kernel reads gradients as backward left them, and writes the rounded
parameters too: 28 bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.adamw import AdamWTensors, Kernel, Rule
from plait.models.parameters import Parameters
from plait.outer import Change
from plait.parallel.data import DataStrategy, RoundedCopies
from plait.torch_internals import has_own_step

MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MODES = ("amsgrad", "maximize", "differentiable", "capturable")
MakeKernel = Callable[[Sequence[AdamWTensors]], Kernel]


def is_at_hand(device: torch.device, make_optimizer: MakeOptimizer) -> bool:
    """Whether the update of an optimizer can be one pass on a device.

    The optimizer is made once for one number, to learn its kind. One that cannot be made so has
    another way to update.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    probe = nn.Parameter(torch.zeros(1, device=device))
    try:
        return takes(make_optimizer(Parameters([("nothing", probe)])))
    except Exception:  # a user's own function may ask for the model's parameters
        return False


def takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is torch's fused AdamW in its plain form, whose step nobody watches."""
    if type(optimizer) is not torch.optim.AdamW or not has_own_step(optimizer):
        return False
    return all(_is_plain(group) for group in optimizer.param_groups)


def _is_plain(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"])
    if not all(isinstance(number, float | int) for number in numbers):
        return False
    return bool(group.get("fused")) and not any(group.get(mode) for mode in MODES)


def kernel_of_gpus() -> MakeKernel:
    """The kernel for tensors of a GPU; it needs Triton."""
    from plait.engine.adamw_kernel import TritonKernel

    return TritonKernel


@dataclass(frozen=True)
class _Prepared:
    """The parameters of one group that had gradients, and the kernel that was made for them."""

    params: Sequence[nn.Parameter]
    kept: Sequence[AdamWTensors]
    steps: Tensor
    update: Kernel

    def is_still(self, params: Sequence[nn.Parameter], state: Mapping[Any, Any]) -> bool:
        """Whether these parameters are meant, and their state lies where it did."""
        return len(params) == len(self.params) and all(
            one is other
            and state[one].get("exp_avg") is kept.mean
            and state[one].get("step") is kept.step
            for one, other, kept in zip(params, self.params, self.kept, strict=True)
        )


class OnePass:
    """The update of one optimizer's parameters by one kernel, with the optimizer's own state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, copies: RoundedCopies, make_kernel: MakeKernel
    ) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._make_kernel = make_kernel
        self._groups: dict[int, _Prepared] = {}

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, strategy: DataStrategy) -> OnePass | None:
        """The update of a strategy that keeps gradients as computed; None for all others."""
        copies = strategy.copies
        return None if copies is None else cls(optimizer, copies, kernel_of_gpus())

    def step(self, change: Change) -> bool:
        """One step as asked for; False where the optimizer must do it by itself."""
        if not takes(self._optimizer):
            return False
        for index, settings in enumerate(self._optimizer.param_groups):
            found = [(p, p.grad) for p in settings["params"] if p.grad is not None]
            if not found:
                continue
            group = self._group(index, [param for param, _ in found])
            grads = [grad.contiguous() for _, grad in found]  # a kernel reads them end to end
            decided = change.on_device
            group.steps.add_(1 if decided is None else 1 - decided.blocked)
            group.update(grads, _rule(settings, change))
        self._copies.are_written()
        return True

    def _group(self, index: int, params: Sequence[nn.Parameter]) -> _Prepared:
        group = self._groups.get(index)
        if group is None or not group.is_still(params, self._optimizer.state):
            steps = self._joined_steps(params)
            kept = [self._kept(param) for param in params]
            group = _Prepared(params, kept, steps, self._make_kernel(kept))
            self._groups[index] = group
        return group

    def _joined_steps(self, params: Sequence[nn.Parameter]) -> Tensor:
        """The counts of steps [n] of parameters in one tensor, of which each has its element."""
        states = [self._state(param) for param in params]
        steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, steps.unbind(), strict=True):
            state["step"] = step
        return steps

    def _kept(self, param: nn.Parameter) -> AdamWTensors:
        state = self._state(param)
        moments = state["exp_avg"], state["exp_avg_sq"]
        return AdamWTensors(param.data, *moments, self._copies.of(param), state["step"])

    def _state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state that torch's AdamW keeps of a parameter [...], made as it makes it."""
        state: dict[str, Tensor] = self._optimizer.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param.data)
            state["exp_avg_sq"] = torch.zeros_like(param.data)
        return state


def _rule(group: dict[str, Any], change: Change) -> Rule:
    rate, decay, epsilon = (float(group[name]) for name in ("lr", "weight_decay", "eps"))
    first, second = (float(beta) for beta in group["betas"])
    return Rule(rate, (first, second), epsilon, decay, change.factor, change.on_device)
