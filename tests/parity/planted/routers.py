"""Faults of routers that both sides of a proof could run: noise, experts that choose tokens, and
the order in which tokens are taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from plait.models import routing
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router
from tests.parity.faults import wrap
from tests.parity.planted.entry import ONE_DEVICE, Entry


def noise_learns_nothing() -> list[Any]:
    """The width of the noise is cut from the graph."""

    def make(original: Any) -> Any:
        def noisy(self: Router, x: Tensor, logits: Tensor) -> Tensor:
            return logits + (original(self, x, logits) - logits).detach()

        return noisy

    return [wrap(Router, "_noisy", make)]


def noise_is_half_as_wide() -> list[Any]:
    def make(original: Any) -> Any:
        def noisy(self: Router, x: Tensor, logits: Tensor) -> Tensor:
            return logits + 0.5 * (original(self, x, logits) - logits)

        return noisy

    return [wrap(Router, "_noisy", make)]


def noisy_weights_of_all_experts() -> list[Any]:
    """The softmax is that of all experts, and not of the chosen ones."""

    def make(original: Any) -> Any:
        def choose(self: Router, logits: Tensor, scores: Tensor) -> Any:
            found = original(self, logits, scores)
            shares = scores.softmax(-1).flatten(0, 1)[found.token, found.expert]
            return replace(found, weight=shares * self.settings.scale)

        return choose

    return [wrap(Router, "_tokens_choose", make)]


def worst_tokens_first() -> list[Any]:
    return [wrap(routing, "best_first", lambda original: lambda scores: original(-scores))]


def experts_take_one_less() -> list[Any]:
    def make(original: Any) -> Any:
        return lambda self, positions: max(original(self, positions) - 1, 1)

    return [wrap(RouterSettings, "capacity", make)]


def weights_of_experts_sum_to_one() -> list[Any]:
    """Each token's weights are divided by their sum, as where tokens choose."""

    def make(original: Any) -> Any:
        def choose(self: Router, scores: Tensor) -> Any:
            found = original(self, scores)
            size = scores[..., 0].numel()
            sums = scores.new_zeros(size).index_add(0, found.token, found.weight)
            return replace(found, weight=found.weight / sums[found.token])

        return choose

    return [wrap(Router, "_experts_choose", make)]


def widths_are_linear() -> list[Any]:
    """The width of the noise is not the softplus of what is learned."""
    return [patch.object(F, "softplus", lambda x: x + 1.0)]


NOISY: dict[str, Any] = {"model": "experts", "model_keys": {"topk_method": "noisy"}}
CHOOSING: dict[str, Any] = {"model": "experts", "model_keys": {"topk_method": "expert_choice"}}
FULL: dict[str, Any] = {"model": "experts", "model_keys": {"capacity_factor": 0.6}}


def _fault(name: str, plan: str, patches: Any, keys: dict[str, Any]) -> Entry:
    return Entry(name, plan, "module", ONE_DEVICE, patches, module="mlp", **keys)


ENTRIES = [
    _fault("noise learns nothing", "mb2", noise_learns_nothing, NOISY),
    _fault("noise is half as wide", "dp2", noise_is_half_as_wide, NOISY),
    _fault("widths of noise are linear", "dp2", widths_are_linear, NOISY),
    _fault("noisy weights of all experts", "dp2", noisy_weights_of_all_experts, NOISY),
    _fault("experts take the worst tokens", "dp2", worst_tokens_first, CHOOSING),
    _fault("experts take one token less", "dp2", experts_take_one_less, CHOOSING),
    _fault("weights of experts sum to one", "dp2", weights_of_experts_sum_to_one, CHOOSING),
    _fault("full experts keep the worst", "dp2", worst_tokens_first, FULL),
]
