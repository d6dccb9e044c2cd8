"""A mixture of experts: a router, the experts as one grouped product, and the experts that every
token shares.

Shazeer et al., "Outrageously Large Neural Networks" (2017); shared and fine-grained experts: Dai et
al., "DeepSeekMoE" (2024), section 3. Between permuting the tokens and computing them stands an
`Exchange`, which does nothing on one device. Where experts live on other ranks, a strategy puts its
own there. The shared experts compute while tokens travel. Shapes: B samples, S positions, N = B S
tokens, R routed rows, D hidden size, I inner size. E is the number of this rank's experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.gated import gated_experts
from plait.models.grouped import default_method
from plait.models.layers import start_normal
from plait.models.low_rank import ExpertMatrix, LowRank, low_rank_of, product
from plait.models.permute import add_up, counted, inverse, to_rows
from plait.models.routing import Router, Routing
from plait.products import Products

Spread = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
Door = Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    """`x` [...] itself: experts that are all on this rank need no exchange before or after them."""
    return x


class DispatchHandle:
    """Rows [R, D] under way to their experts, and the way back."""

    def __init__(self, rows: Tensor, counts: Sequence[int]) -> None:
        self.rows = rows
        self.counts = list(counts)

    def wait(self) -> tuple[Tensor, list[int]]:
        """The rows [rows here, D] that are here now, sorted by expert, and how many each expert of
        this rank has.
        """
        return self.rows, self.counts

    def combine(self, rows: Tensor) -> Tensor:
        """The experts' results [rows here, D] on the ranks of their tokens, [R, D]: the inverse of
        dispatch and wait.
        """
        return rows


class Exchange:
    """Sends rows to where their experts are."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> DispatchHandle:
        """Let rows go to their experts: `rows` [R, D] sorted by expert, `counts` [experts, on all
        ranks].
        """
        return DispatchHandle(rows, counts.tolist())


class ExpertWeights(nn.Module, ABC):
    """The experts of a mixture that are here.

    Attributes:
        method: of the grouped product; None for the rule of thumb.
        products: which library multiplies, where the method leaves a choice.
        spread: from the weights at home here to those that compute here; None where that is the
            same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.method: str | None = None
        self.products = Products()
        self.spread: Spread | None = None

    def multiply_with(self, products: Products) -> None:
        """Use these matrix products, where the method leaves a choice."""
        self.products = products

    def multiply_by(self, method: str) -> None:
        """Compute the grouped product by this method."""
        self.method = method

    def spread_by(self, spread: Spread | None) -> None:
        """Compute with the weights that `spread` makes of those at home here."""
        self.spread = spread

    def at_work(self, *keys: str) -> list[ExpertMatrix]:
        """The matrices called `keys` [E, out, in] of the experts that compute here, with their
        adapters.

        Collective where other ranks compute with weights that are at home here.
        """
        weights: list[Tensor] = [getattr(self, key) for key in keys]
        adapters = [low_rank_of(self, key) for key in keys]
        if self.spread is None:
            return [ExpertMatrix(*pair) for pair in zip(weights, adapters, strict=True)]
        narrow = [part for one in adapters if one is not None for part in (one.a, one.b)]
        spread = iter(self.spread([*weights, *narrow]))
        moved = [next(spread) for _ in weights]
        return [
            ExpertMatrix(weight, one and LowRank(next(spread), next(spread), one.scale))
            for weight, one in zip(moved, adapters, strict=True)
        ]

    @property
    @abstractmethod
    def first(self) -> Tensor:
        """The weight of the first product, [E, out, D]."""

    @abstractmethod
    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, D] sorted by expert -> [R, D]; `counts` are E numbers that sum to R."""


class Experts(ExpertWeights):
    """E gated MLPs, down(silu(gate(x)) * up(x)), as three grouped products."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        std: float,
        std_residual: float,
    ) -> None:
        super().__init__()
        self.std = std
        self.std_residual = std_residual
        self.gate = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size))
        self.reset_parameters()

    @property
    def first(self) -> Tensor:
        """The weight of the first product, [E, I, D]."""
        return self.gate

    def reset_parameters(self) -> None:
        """Normal."""
        start_normal(self.gate, self.std)
        start_normal(self.up, self.std)
        start_normal(self.down, self.std_residual)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, D] sorted by expert -> [R, D]."""
        matrices = self.at_work("gate", "up", "down")
        method = self.method or default_method(matrices[0].weight)
        if all(matrix.low_rank is None for matrix in matrices):
            weights = [matrix.weight for matrix in matrices]
            return gated_experts(rows, weights, counts, method, self.products)
        gate, up, down = matrices
        inner = F.silu(product(rows, gate, counts, method)) * product(rows, up, counts, method)
        return product(inner, down, counts, method)


class MixtureOfExperts(nn.Module):
    """[B, S, D] -> [B, S, D]: the weighted sum of the experts that the router chose, and of the
    shared ones.

    Sources: Shazeer et al. 2017; with shared experts Dai et al. 2024, section 3.
    """

    computes_tokens_alone = True

    def __init__(self, router: Router, experts: ExpertWeights, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.exchange = Exchange()
        # Where activations are in parts between layers: to whole sequences, and back.
        self.enter: Door = as_it_is
        self.leave: Door = as_it_is

    def exchange_by(self, exchange: Exchange) -> None:
        """Send rows to experts on other ranks."""
        self.exchange = exchange

    def open(self, enter: Door, leave: Door) -> None:
        """Route whole sequences: `enter` makes them of the parts here, `leave` cuts the results."""
        self.enter = enter
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]. Route, send, compute the shared experts at the same time,
        compute, bring back, add up by token.

        Collective where experts are on several ranks.
        """
        whole = self.enter(x)
        routing = self.router(whole)
        tokens = whole.flatten(0, 1)
        order = routing.expert.argsort(stable=True)
        counts = counted(routing.expert, self.router.settings.num_experts)
        path = self._path(routing, order, tokens)
        handle = self.exchange.dispatch(path.to_rows(tokens), counts)
        shared = None if self.shared is None else self.shared(x)
        output = path.add_up(handle.combine(self.experts(*handle.wait()))).view_as(whole)
        output = self.leave(self.router.context.attach(output, self.router.auxiliary))
        return output if shared is None else output + shared

    def _path(self, routing: Routing, order: Tensor, tokens: Tensor) -> _Path:
        k = self.router.settings.num_chosen
        if (
            len(tokens)
            and len(order) == k * len(tokens)
            and self.router.settings.method != "expert_choice"
        ):
            return _EvenPath(routing, order)
        return _Path(routing, order)


class _Path:
    """From tokens to rows that are sorted by expert, and back. `order`: of the pairs of a
    routing.
    """

    def __init__(self, routing: Routing, order: Tensor) -> None:
        self._order = order
        self._token = routing.token[order]
        self._weight = routing.weight

    def to_rows(self, tokens: Tensor) -> Tensor:
        """[N, D] -> [R, D]."""
        self._like = tokens
        return tokens[self._token]

    def add_up(self, rows: Tensor) -> Tensor:
        """[R, D] -> [N, D], weighed."""
        weighted = rows * self._weight[self._order].to(rows.dtype)[:, None]
        return torch.zeros_like(self._like).index_add(0, self._token, weighted)


class _EvenPath(_Path):
    """Where nothing was dropped: each token has k rows, and both ways are gathers."""

    def __init__(self, routing: Routing, order: Tensor) -> None:
        super().__init__(routing, order)
        self._back = inverse(order)

    def to_rows(self, tokens: Tensor) -> Tensor:
        self._like = tokens
        return to_rows(tokens, self._order, self._back)

    def add_up(self, rows: Tensor) -> Tensor:
        weight = self._weight.view(len(self._like), -1).to(rows.dtype)
        return add_up(rows, weight, self._order, self._back)


def mixtures(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """The mixtures of a model, by the names of their routers."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        names[id(module.router)]: module
        for module in model.modules()
        if isinstance(module, MixtureOfExperts)
    }
