"""A mixture of experts: a router, the experts as one grouped product, and the experts that every token shares.

Shazeer et al., "Outrageously Large Neural Networks" (2017); shared and fine-grained experts: Dai et al., "DeepSeekMoE"
(2024), section 3. Between permuting the tokens and computing them stands an `Exchange`, which on one device does nothing:
where experts live on other ranks, a strategy puts its own there, and the shared experts compute while tokens travel.
Shapes: B samples, S positions, N = B S tokens, R routed rows, D hidden size, I inner size, E experts (here: of this rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.grouped import default_method, grouped_product
from plait.models.routing import Router, Routing

Spread = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class Trip:
    """Rows under way to their experts, and the way back."""

    def __init__(self, rows: Tensor, counts: Sequence[int]) -> None:
        self.rows, self.counts = rows, list(counts)

    def arrive(self) -> tuple[Tensor, list[int]]:
        """The rows that are here now, sorted by expert, and how many each expert of this rank has."""
        return self.rows, self.counts

    def combine(self, rows: Tensor) -> Tensor:
        """What became of them, where they came from: the inverse of dispatch and arrive."""
        return rows


class Exchange:
    """Sends rows to where their experts are."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> Trip:
        """`rows` [R, D] sorted by expert, `counts` [E] of all experts."""
        return Trip(rows, counts.tolist())


class Experts(nn.Module):
    """E gated MLPs, down(silu(gate(x)) * up(x)), as three grouped products."""

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int, *, std: float, std_residual: float) -> None:
        super().__init__()
        self.std, self.std_residual = std, std_residual
        self.gate = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size))
        self.method: str | None = None  # of the grouped product; None for the rule of thumb
        self.spread: Spread | None = None  # from the weights at home here to those that compute here
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal."""
        nn.init.normal_(self.gate, std=self.std)
        nn.init.normal_(self.up, std=self.std)
        nn.init.normal_(self.down, std=self.std_residual)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, D] sorted by expert -> [R, D]."""
        weights: Sequence[Tensor] = (self.gate, self.up, self.down)
        gate, up, down = weights if self.spread is None else self.spread(weights)
        method = self.method or default_method(gate)
        inner = F.silu(grouped_product(rows, gate, counts, method)) * grouped_product(rows, up, counts, method)
        return grouped_product(inner, down, counts, method)


class MixtureOfExperts(nn.Module):
    """[B, S, D] -> [B, S, D]: the weighted sum of the experts that the router chose, and of the shared ones."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.exchange = Exchange()

    def forward(self, x: Tensor) -> Tensor:
        """Route, send, compute the shared experts meanwhile, compute, bring back, add up by token."""
        routing = self.router(x)
        tokens = x.flatten(0, 1)
        order = routing.expert.argsort(stable=True)
        token = routing.token[order]
        counts = torch.bincount(routing.expert, minlength=self.router.settings.num_experts)
        trip = self.exchange.dispatch(tokens[token], counts)
        shared = None if self.shared is None else self.shared(x)
        rows = trip.combine(self.experts(*trip.arrive()))
        output = self._add_up(rows, routing, order, token, tokens).view_as(x)
        if shared is not None:
            output = output + shared
        return self.router.surroundings.attach(output, self.router.auxiliary)

    def _add_up(self, rows: Tensor, routing: Routing, order: Tensor, token: Tensor, tokens: Tensor) -> Tensor:
        weighted = rows * routing.weight[order].to(rows.dtype)[:, None]
        k, rest = divmod(len(order), max(len(tokens), 1))
        if rest == 0 and k == self.router.settings.num_chosen and self.router.settings.method != "expert_choice":
            back = torch.empty_like(order)  # nothing was dropped: each token has its k rows
            back[order] = torch.arange(len(order), device=order.device)
            return weighted[back].unflatten(0, (-1, k)).sum(1)
        return torch.zeros_like(tokens).index_add(0, token, weighted)
