"""The router of a mixture of experts: each token's experts and weights, and the means that keep
experts balanced.

Capacity and the choice of the experts look at a *sequence*, the balance loss at all tokens of a
micro-batch. `RouterContext` says which parts of these lie on other ranks. So no decision depends on
how many ranks there are. Shapes: B samples, S positions, N = B S tokens, D hidden size, E experts,
k experts a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.layers import start_normal
from plait.models.losses import widen
from plait.models.permute import counted
from plait.models.router_settings import RouterSettings


@dataclass(frozen=True)
class Routing:
    """R pairs of a token and an expert: `token` [R] in 0..N-1, `expert` [R] in 0..E-1, `weight`
    [R].
    """

    token: Tensor
    expert: Tensor
    weight: Tensor


class RouterContext:
    """Sums and sequences over the tokens that a router does not see.

    On one device there are none: every method is the identity.

    Attributes:
        present: 0.0 for a placeholder, whose tokens count for nothing.
        recording: False in a forward that recomputes: its tokens have been counted.
    """

    present: float = 1.0
    recording: bool = True

    def sizes(self, num_samples: int, num_positions: int) -> tuple[float | Tensor, int]:
        """Samples of this micro-batch on all ranks, and positions of a whole sequence.

        Samples are 0-dim on the device, where other ranks have some.
        """
        return float(num_samples), num_positions

    def sum_tokens(self, counts: Tensor) -> Tensor:
        """Sums of counts [...] over everything that holds other tokens of this micro-batch; not
        differentiable.
        """
        return counts

    def sum_sequence(self, counts: Tensor) -> Tensor:
        """Sums of counts [...] over everything that holds other positions of the same sequences;
        not differentiable.
        """
        return counts

    def whole_sequence(self, part: Tensor) -> Tensor:
        """[B, S here, ...] -> [B, S, ...] in the order of positions; not differentiable."""
        return part

    def own_positions(self, whole: Tensor) -> Tensor:
        """[B, S, ...] -> [B, S here, ...]: the inverse of `whole_sequence`."""
        return whole

    def attach(self, output: Tensor, auxiliary: Tensor | None) -> Tensor:
        """`output` [...], through which the auxiliary loss (0-dim) may reach backward; on one
        device the caller adds it to the loss.
        """
        return output


class Router(nn.Module):
    """Scores tokens and chooses experts, in float32 at least: [B, S, D] -> Routing.

    After a forward in training, `auxiliary` is this rank's part of the auxiliary loss, and has a
    gradient. `load` [E + 2] has grown by the tokens of each expert (as chosen), the dropped pairs,
    and all pairs.
    """

    WIDE_BUFFERS = ("bias",)  # a thousandth is added to it: nothing that bf16 could hold
    bias: Tensor | None

    def __init__(self, hidden_size: int, settings: RouterSettings, *, std: float = 0.02) -> None:
        super().__init__()
        self.settings = settings
        self.std = std
        self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
        self.noise_weight = (
            nn.Parameter(torch.empty_like(self.weight)) if settings.method == "noisy" else None
        )
        self.register_buffer(
            "bias", torch.zeros(settings.num_experts) if settings.bias_speed else None
        )
        self.context = RouterContext()
        self.auxiliary: Tensor | None = None
        self.load: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights; no noise and no bias to begin with."""
        start_normal(self.weight, self.std)
        if self.noise_weight is not None:
            nn.init.zeros_(self.noise_weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Routing:
        """Route the N = B S tokens of x [B, S, D] to R pairs of a token and an expert.

        Where tokens choose, R is N k, less the pairs for which an expert has no room. Where experts
        choose, each takes its capacity of every sequence.
        """
        self.auxiliary = None
        wide = widen(x)
        logits = wide @ widen(self.weight).t()
        scores = self._scores(self._noisy(wide, logits))
        routing = (
            self._experts_choose(scores)
            if self.settings.method == "expert_choice"
            else self._tokens_choose(logits, scores)
        )
        if self.training and self.settings.z_coef:
            samples, positions = self.context.sizes(*x.shape[:2])
            factor = _quotient(self.settings.z_coef * self.context.present, samples * positions)
            z = _times(logits.logsumexp(-1).square().sum(), factor)
            self.auxiliary = z if self.auxiliary is None else self.auxiliary + z
        return routing

    def auxiliary_loss(self) -> Tensor | None:
        """The auxiliary loss of the last forward: 0-dim, to be added to the mean loss.

        Its sum over the ranks of a micro-batch is the loss of the micro-batch.
        """
        return self.auxiliary

    def route_in(self, context: RouterContext) -> None:
        """Take the facts of micro-batches from `context` from now on."""
        self.context = context

    def balance(self, load: Tensor | None) -> None:
        """Balance by bias from `load` [E + 2], the whole step's over all ranks; drop this rank's
        load.

        Source: Wang et al. 2024, algorithm 1.
        """
        if self.bias is not None and load is not None:
            chosen = load[: self.settings.num_experts]
            self.bias.add_(
                (chosen.mean() - chosen).sign().to(self.bias.dtype), alpha=self.settings.bias_speed
            )
        self.load = None

    def after_update(self) -> None:
        """Balance by this device's load alone. A plain training loop calls it after an update."""
        self.balance(self.load)

    # -- scores ------------------------------------------------------------------------------------

    def _scores(self, logits: Tensor) -> Tensor:
        if self.settings.method == "noisy":
            return logits
        return logits.softmax(-1) if self.settings.scoring == "softmax" else logits.sigmoid()

    def _noisy(self, x: Tensor, logits: Tensor) -> Tensor:
        """H(x) of Shazeer et al.: noise of a learned width. Drawn for whole sequences, so that
        slices see the same.
        """
        if self.noise_weight is None or not self.training:
            return logits
        _, positions = self.context.sizes(*x.shape[:2])
        noise = torch.randn(
            x.shape[0], positions, logits.shape[-1], dtype=logits.dtype, device=logits.device
        )
        return logits + self.context.own_positions(noise) * F.softplus(
            x @ widen(self.noise_weight).t()
        )

    # -- tokens choose experts ---------------------------------------------------------------------

    def _tokens_choose(self, logits: Tensor, scores: Tensor) -> Routing:
        settings = self.settings
        chosen = self._best(scores)  # [B, S, k]
        weight = scores.gather(-1, chosen)
        if settings.method == "noisy":
            weight = weight.softmax(-1)
        elif settings.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        within = self._within_capacity(chosen, scores.gather(-1, chosen).detach())
        if self.training:
            self._record(chosen, within)
            if settings.balance_coef:
                shares = (
                    logits.softmax(-1)
                    if settings.scoring == "softmax"
                    else scores / scores.sum(-1, keepdim=True)
                )
                self.auxiliary = self._balance(chosen, shares)
        token = torch.arange(chosen[..., 0].numel(), device=chosen.device)[:, None].expand(
            -1, settings.num_chosen
        )
        parts = (token.reshape(-1), chosen.reshape(-1), weight.reshape(-1) * settings.scale)
        return (
            Routing(*parts)
            if within is None
            else Routing(*(part[within.reshape(-1)] for part in parts))
        )

    def _best(self, scores: Tensor) -> Tensor:
        """The k experts of each token; the bias has a say here and nowhere else."""
        settings = self.settings
        preferences = scores.detach()
        if self.bias is not None:
            preferences = preferences + self.bias.to(preferences.dtype)
        if settings.num_groups > 1:
            grouped = preferences.unflatten(-1, (settings.num_groups, -1))
            best = min(2 if settings.method == "noaux_tc" else 1, grouped.shape[-1])
            groups = (
                grouped.topk(best, dim=-1)
                .values.sum(-1)
                .topk(settings.num_chosen_groups, dim=-1)
                .indices
            )
            open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(
                -1, groups, True
            )
            preferences = grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(-2)
        return preferences.topk(settings.num_chosen, dim=-1).indices

    def _within_capacity(self, chosen: Tensor, scores: Tensor) -> Tensor | None:
        """Which pairs their expert has room for [B, S, k]; None when nothing can be dropped."""
        if self.settings.capacity_factor is None:
            return None
        chosen = self.context.whole_sequence(chosen)
        scores = self.context.whole_sequence(scores)
        experts = chosen.flatten(1)
        num_chosen = chosen.shape[-1]
        if self.settings.drop_by == "score":
            order = best_first(scores.flatten(1))
        else:
            order = torch.arange(experts.shape[1], device=experts.device).expand_as(experts)
        place = torch.empty_like(experts).scatter_(
            1, order, place_in_group(experts.gather(1, order))
        )
        kept = place < self.settings.capacity(chosen.shape[1])
        return self.context.own_positions(kept.unflatten(1, (-1, num_chosen)))

    # -- experts choose tokens ---------------------------------------------------------------------

    def _experts_choose(self, scores: Tensor) -> Routing:
        """Each expert takes the same number of tokens of a sequence, those with the best scores."""
        whole = self.context.whole_sequence(scores.detach())
        taken = best_first(whole)[:, : self.settings.capacity(whole.shape[1])]
        mask = self.context.own_positions(
            torch.zeros_like(whole, dtype=torch.bool).scatter_(1, taken, True)
        )
        token, expert = mask.flatten(0, 1).nonzero(as_tuple=True)
        if self.training:
            self._count(counted(expert, scores.shape[-1]), None, len(expert))
        return Routing(token, expert, scores.flatten(0, 1)[token, expert] * self.settings.scale)

    # -- balance -----------------------------------------------------------------------------------

    def _balance(self, chosen: Tensor, shares: Tensor) -> Tensor:
        """E / k sum_e f_e P_e, with f_e the share of the tokens that chose expert e and P_e its
        mean score.

        Fedus et al., "Switch Transformers", equations 4 to 6, with k experts a token; 1 when
        balanced. Over all tokens of the micro-batch, or the mean over sequences of the same within
        each (DeepSeek-V3, equations 17 to 20).
        """
        settings = self.settings
        around = self.context
        samples, positions = around.sizes(*chosen.shape[:2])
        counts = (
            F.one_hot(chosen.flatten(1), settings.num_experts).sum(1).to(shares.dtype)
            * around.present
        )  # [B, E]
        if settings.balance_per_sequence:
            total = around.sum_sequence(counts)
            per = samples * positions**2
        else:
            total = around.sum_tokens(counts.sum(0))
            per = (samples * positions) ** 2
        factor = _quotient(
            settings.balance_coef * around.present * settings.num_experts,
            settings.num_chosen * per,
        )
        return _times((total * shares.sum(1)).sum(), factor)

    def _record(self, chosen: Tensor, kept: Tensor | None) -> None:
        counts = counted(chosen.reshape(-1), self.settings.num_experts)
        self._count(counts, None if kept is None else (~kept).sum(), chosen.numel())

    def _count(self, counts: Tensor, num_dropped: Tensor | None, num_pairs: int) -> None:
        """Add a forward to the load; the host reads nothing for it."""
        if not self.context.recording:
            return
        pairs = counts.new_full((1,), num_pairs)
        dropped = torch.zeros_like(pairs) if num_dropped is None else num_dropped.reshape(1)
        seen = torch.cat((counts, dropped, pairs)).double() * self.context.present
        self.load = seen if self.load is None else self.load + seen


def _quotient(number: float, divisor: float | Tensor) -> float | Tensor:
    """`number` over `divisor` (0-dim), rounded once; torch's own division rounds 1 / divisor."""
    if isinstance(divisor, Tensor):
        return torch.full_like(divisor, number) / divisor
    return number / divisor


def _times(value: Tensor, factor: float | Tensor) -> Tensor:
    """`value` (0-dim) times a factor, in the precision of `value`."""
    return value * (factor if isinstance(factor, float) else factor.to(value.dtype))


def best_first(scores: Tensor) -> Tensor:
    """[B, L, ...] -> the indices along L, best score first; of scores that differ by rounding
    alone, the first in order.

    Tokens with equal pasts score alike in exact arithmetic, as in a sequence that begins with one
    token twice. The last bit, and so their order, depends on how the work was split. So the upper
    half of the digits decides (Dekker, A floating-point technique for extending the available
    precision, 1971, section 4). Then the position decides.
    """
    digits = 1 - round(math.log2(torch.finfo(scores.dtype).eps))
    scaled = scores * (2.0 ** (digits - digits // 2) + 1)
    return (scaled - (scaled - scores)).argsort(dim=1, descending=True, stable=True)


def place_in_group(groups: Tensor) -> Tensor:
    """For each entry of a row, how many entries before it are of the same group: [B, L] integers ->
    [B, L].

    >>> place_in_group(torch.tensor([[1, 0, 1, 1, 0]])).tolist()
    [[0, 0, 1, 2, 1]]
    """
    ordered, order = groups.sort(dim=1, stable=True)
    index = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(begins, index, torch.zeros_like(index)).cummax(dim=1).values
    return torch.empty_like(groups).scatter_(1, order, index - first)
