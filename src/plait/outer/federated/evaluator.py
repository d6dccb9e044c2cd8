"""Judging weights: a plain model on one device, whatever the plan that trains; it sees flat vectors
and test samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.batch_trees import map_tensors
from plait.engine.batch import call
from plait.engine.state.init import Initializer, is_meta, place_holders
from plait.models.losses import IGNORE
from plait.outer.federated.samples import Subset

BATCH = 64  # samples that are evaluated at once


class Evaluator:
    """Accuracy of weights. Buffers are those that the model begins with: statistics of batch-norm
    stay with the clients.
    """

    def __init__(self, model: nn.Module, seed: int, dtype: torch.dtype) -> None:
        cpu = torch.device("cpu")
        if is_meta(model):
            place_holders(model, dtype, cpu)

            def take(param: nn.Parameter, value: Tensor) -> None:
                param.data = value.to(dtype, copy=True)

            Initializer(model, seed, dtype, cpu).run(take)
        self._model = model.to(dtype)
        self._named = {
            name: param for name, param in sorted(model.named_parameters()) if param.requires_grad
        }
        self._params = list(self._named.values())
        self._start = torch.cat([param.detach().reshape(-1) for param in self._params])

    def initial(self) -> Tensor:
        """The weights that training begins with under any plan, flat (numel,): end to end in the
        order of their names.
        """
        return self._start.clone()

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The flat vector (numel,) cut into the model's parameters, by name and in their shapes."""
        parts = weights.split([param.numel() for param in self._params])
        return {
            name: part.view(param.shape)
            for (name, param), part in zip(self._named.items(), parts, strict=True)
        }

    @torch.no_grad()
    def accuracy(self, weights: Tensor, test: Subset) -> float | None:
        """The share of targets that are predicted right with the flat weights, unmasked
        ones only. None where targets are no numbers of classes, or there are none.
        """
        for name, value in self.named(weights).items():
            self._named[name].copy_(value)
        self._model.eval()
        num_right = 0
        num_counted = 0
        for indices in torch.arange(len(test)).split(BATCH):
            inputs, targets = test.batch(indices)
            output = call(self._model, map_tensors(self._in_dtype, inputs))
            if not are_classes(output, targets):
                return None
            counted = targets != IGNORE
            num_right += int(((output.argmax(dim=-1) == targets) & counted).sum())
            num_counted += int(counted.sum())
        return num_right / num_counted if num_counted else None

    def _in_dtype(self, value: Tensor) -> Tensor:
        return value.to(self._params[0].dtype) if value.is_floating_point() else value


def are_classes(output: object, targets: object) -> bool:
    """Whether targets [...] are numbers of the classes, two or more, of an output
    [..., classes].
    """
    return (
        isinstance(output, Tensor)
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
        and output.shape[:-1] == targets.shape
        and output.dim() > 0
        and output.shape[-1] > 1
    )
