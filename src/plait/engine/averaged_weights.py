"""An exponential moving average of the weights, which is evaluated and saved in their place.

Each rank keeps the average of its own parts beside the optimizer's state of them. So every plan can
keep one, and checkpoints hold it by slices. Source: Polyak and Juditsky 1992 (SIAM J. Control
Optim. 30(4)); the rule and its first value are those of torch's `AveragedModel` with
`get_ema_multi_avg_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.errors import OptimizerError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
AVERAGE = "average"
"""The key of the other set of weights [...] in the optimizer's state of a parameter."""
MODE = "train_mode"
NUM_AVERAGED = "num_averaged"
"""The steps in an average, as torch's `AveragedModel` counts them in `n_averaged`."""


class AveragedWeights:
    """Declares that the moving average of the weights is evaluated and saved.

    After each step the average is `decay * average + (1 - decay) * weights`; after the first it is
    the weights. `engine.evaluate`, `save` and `save_pretrained` have the average. Steps go on from
    the weights themselves, and a checkpoint holds both.
    """

    def __init__(self, make_optimizer: MakeOptimizer, *, decay: float = 0.999) -> None:
        """Take the function that makes the optimizer of a rank's parameters, and the decay.

        Raises:
            OptimizerError: a decay outside [0, 1), or an optimizer that needs whole tensors.
        """
        if not 0.0 <= decay < 1.0:
            raise OptimizerError(
                f"decay = {decay} of plait.AveragedWeights is no weight of an average; give one "
                "from 0 to below 1, as 0.999"
            )
        if getattr(make_optimizer, "keeps_state_whole", False):
            raise OptimizerError(
                "plait.AveragedWeights keeps an average of parts, and plait.WholeTensors has whole "
                "tensors at their owners; use one of them"
            )
        self.needs_whole = getattr(make_optimizer, "needs_whole", False)
        self._make = make_optimizer
        self._decay = decay

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of parameters [...], with their average."""
        inner = self._make(params)
        if not isinstance(inner, torch.optim.Optimizer):
            raise OptimizerError(
                "the function of plait.AveragedWeights must return a torch.optim.Optimizer; it "
                f"returned a {type(inner).__name__}"
            )
        kind = type(f"Averaged{type(inner).__name__}", (AveragingOptimizer,), {})
        made: torch.optim.Optimizer = kind(inner, self._decay)
        return made


class AveragingOptimizer(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it has, and averages the weights."""

    def __init__(self, inner: torch.optim.Optimizer, decay: float) -> None:
        for group in inner.param_groups:
            group.update({MODE: True, NUM_AVERAGED: 0})
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.state = inner.state
        self._inner = inner
        self._decay = decay

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step of the optimizer, and of the average; a closure is not called."""
        before = self._without_average()
        with torch.enable_grad():
            torch_internals.step(self._inner)
        for group in self.param_groups:
            is_first = group[NUM_AVERAGED] == 0
            group[NUM_AVERAGED] += 1
            for param in group["params"]:
                if param in before:
                    first = param if is_first else before[param]
                    self.state[param][AVERAGE] = first.detach().clone()
            averaged = [param for param in group["params"] if AVERAGE in self.state.get(param, ())]
            if averaged:
                averages = [self.state[param][AVERAGE] for param in averaged]
                torch._foreach_lerp_(averages, averaged, 1.0 - self._decay)

    def _without_average(self) -> dict[nn.Parameter, Tensor]:
        """Parameters [...] that their first step is about to move, and their values before it.

        Others have no state yet, by which an optimizer knows that it has not moved them.
        """
        return {
            param: param.detach().clone() if group[NUM_AVERAGED] else param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None and AVERAGE not in self.state.get(param, ())
        }

    def train(self) -> None:
        """Put the weights in place that a step moves."""
        self._exchange(is_training=True)

    def eval(self) -> None:
        """Put the average in place."""
        self._exchange(is_training=False)

    @torch.no_grad()
    def _exchange(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group[MODE] is is_training:
                continue
            group[MODE] = is_training
            for param in group["params"]:
                other = self.state.get(param, {}).get(AVERAGE)
                if other is not None:
                    before = param.clone()
                    param.copy_(other)
                    other.copy_(before)
