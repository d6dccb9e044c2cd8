"""Layers with hand-written gradients, written again: experts, their router, and adapters.

Both sides of a proof make one model. A fault in the backward of its experts, or in the formula of
its balance loss, would be on both. So one device computes these layers by plain operations of
torch, expert by expert, and autograd makes their gradients.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from plait.models.adapters import adapted
from plait.models.expert_adapters import put_back, put_sums
from plait.models.experts import Experts, MixtureOfExperts
from plait.models.routing import Router, Routing
from plait.values import JsonMapping, PyTree

ADAPTER = "adapter"


def plain_layers(model: nn.Module, keys: JsonMapping) -> nn.Module:
    """The model with these layers exchanged; their parameters and names are as they were."""
    with_adapter = adapted(model)
    for name, module in list(model.named_modules()):
        plain: nn.Module | None = None
        if type(module) is MixtureOfExperts and isinstance(module.experts, Experts):
            plain = PlainMixture(module, keys.get(ADAPTER) or {})
        elif name in with_adapter and not module.adapter.keys:
            plain = PlainAdapted(module, keys.get(ADAPTER) or {})
        elif name in with_adapter and type(module) is not Experts:
            plain = PlainAdaptedExperts(module, keys.get(ADAPTER) or {})
        if plain is not None and name:
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).add_module(own, plain.train(module.training))
    return model


class PlainMixture(nn.Module):
    """[B, S, D] -> [B, S, D]: each expert computes its tokens, one expert after the other."""

    def __init__(self, mixture: MixtureOfExperts, adapter: JsonMapping) -> None:
        super().__init__()
        own = type(mixture.router) is Router
        self.router = PlainRouter(mixture.router) if own else mixture.router
        self.experts = PlainExperts(mixture.experts, adapter)
        self.shared = mixture.shared

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]: the weighted sum of the experts that the router chose, and of the
        shared ones.
        """
        routing = self.router(x)
        tokens = x.flatten(0, 1)
        order = routing.expert.argsort(stable=True)
        token = routing.token[order]
        made = self.experts(tokens[token], routing.expert[order])
        weighed = made * routing.weight[order].to(made.dtype)[:, None]
        output = torch.zeros_like(tokens).index_add(0, token, weighed).view_as(x)
        return output if self.shared is None else output + self.shared(x)


class PlainExperts(nn.Module):
    """Gated MLPs, one for each expert: rows [R, D] and their experts [R] -> [R, D]."""

    def __init__(self, experts: Any, adapter: JsonMapping) -> None:
        super().__init__()
        self.gate = experts.gate
        self.up = experts.up
        self.down = experts.down
        for name, child in experts.named_children():
            self.add_module(name, child)
        self._adapter = vars(experts).get("adapter")
        self._settings = adapter

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Rows [R, D], sorted by their experts [R], -> [R, D]."""
        weights = {"gate": self.gate, "up": self.up, "down": self.down}
        if self._adapter is not None:
            weights |= _summed(self, self._adapter, self._settings)
        made = []
        for number in range(len(self.gate)):
            own = rows[expert == number]
            gate, up, down = (weights[key][number].T for key in ("gate", "up", "down"))
            made.append((F.silu(own @ gate) * (own @ up)) @ down)
        return torch.cat(made)


class PlainRouter(Router):
    """A router of every method, with the parameters of another."""

    def __init__(self, router: Router) -> None:
        with torch.device("meta"):
            super().__init__(router.weight.shape[1], router.settings, std=router.std)
        self.weight = router.weight
        self.noise_weight = router.noise_weight
        self.bias = router.bias
        self.context = router.context

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of x, and keep the auxiliary loss and the load."""
        settings = self.settings
        wide = x.float() if x.itemsize < 4 else x
        logits = wide @ self.weight.to(wide.dtype).t()
        softmax = settings.scoring == "softmax"
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        if settings.method == "noisy":
            scores = self._with_noise(wide, logits)
        shares = logits.softmax(-1) if softmax else scores / scores.sum(-1, keepdim=True)
        if settings.method == "expert_choice":
            return self._of_experts(logits, shares, scores)
        chosen = self._choice(scores.detach())
        weight = scores.gather(-1, chosen)
        if settings.method == "noisy":
            weight = (weight - weight.logsumexp(-1, keepdim=True)).exp()
        elif settings.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        kept = self._kept(chosen, scores.detach())
        self._finish(logits, shares, chosen, kept)
        token, place = kept.flatten(0, 1).nonzero(as_tuple=True)
        expert, factor = (one.flatten(0, 1)[token, place] for one in (chosen, weight))
        return Routing(token, expert, factor * settings.scale)

    def balance(self, load: Tensor | None) -> None:
        """Experts with more tokens than the mean become less wanted, others more."""
        if self.bias is not None and load is not None:
            chosen = load[: self.settings.num_experts]
            below = torch.sign(chosen.mean() - chosen)
            self.bias += self.settings.bias_speed * below.to(self.bias.dtype)
        self.load = None

    def _finish(self, logits: Tensor, shares: Tensor, chosen: Tensor, kept: Tensor) -> None:
        """In training, keep the load and the auxiliary loss."""
        if self.training:
            self._remember(chosen, kept)
        self.auxiliary = self._auxiliary(logits, shares, chosen) if self.training else None

    def _with_noise(self, x: Tensor, logits: Tensor) -> Tensor:
        """The logits, in training with normal noise of a learned width: ln(1 + e^width).

        Source: Shazeer et al. 2017, equations 3 to 5.
        """
        if not self.training or self.noise_weight is None:
            return logits
        noise = torch.randn(logits.shape, dtype=logits.dtype, device=logits.device)
        width = x @ self.noise_weight.to(x.dtype).t()
        return logits + noise * torch.logaddexp(width, torch.zeros_like(width))

    def _of_experts(self, logits: Tensor, shares: Tensor, scores: Tensor) -> Routing:
        """Each expert takes its best tokens of each sequence, as many as every other.

        Source: Zhou et al. 2022, section 3.2.
        """
        settings = self.settings
        samples, positions, experts = scores.shape
        wanted = (settings.capacity_factor or 1.0) * settings.num_chosen * positions / experts
        each = min(positions, -int(-wanted // 1))
        best = _ranked(scores.detach())[:, :each]  # [B, each, E]
        pairs = [
            (sample * positions + position, expert)
            for sample in range(samples)
            for expert in range(experts)
            for position in best[sample, :, expert].tolist()
        ]
        token, expert = torch.tensor(sorted(pairs)).unbind(-1)
        self._finish(logits, shares, expert, torch.ones_like(expert, dtype=torch.bool))
        return Routing(token, expert, scores.flatten(0, 1)[token, expert] * settings.scale)

    def _choice(self, scores: Tensor) -> Tensor:
        """The k experts of each token [B, S, k], of the best groups alone."""
        settings = self.settings
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if settings.num_groups > 1:
            each = settings.num_experts // settings.num_groups
            groups = scores.unflatten(-1, (settings.num_groups, each))
            most = min(2, each) if settings.method == "noaux_tc" else 1
            of_groups = groups.sort(-1, descending=True).values[..., :most].sum(-1)
            best = of_groups.topk(settings.num_chosen_groups, -1).indices
            is_open = F.one_hot(best, settings.num_groups).sum(-2).bool()
            scores = scores.masked_fill(~is_open.repeat_interleave(each, -1), -torch.inf)
        return scores.topk(settings.num_chosen, -1).indices

    def _kept(self, chosen: Tensor, scores: Tensor) -> Tensor:
        """Which pairs their expert has room for [B, S, k]; it takes them in order."""
        settings = self.settings
        if settings.capacity_factor is None:
            return torch.ones_like(chosen, dtype=torch.bool)
        samples, positions, k = chosen.shape
        wanted = settings.capacity_factor * k * positions / settings.num_experts
        most = min(positions, -int(-wanted // 1))
        experts = chosen.flatten(1)
        order = torch.arange(positions * k).expand(samples, -1)
        if settings.drop_by == "score":
            order = _ranked(scores.gather(-1, chosen).flatten(1))
        kept = torch.zeros_like(experts, dtype=torch.bool)
        for sample in range(samples):
            taken = [0] * settings.num_experts
            for pair in order[sample].tolist():
                expert = int(experts[sample, pair])
                kept[sample, pair] = taken[expert] < most
                taken[expert] += 1
        return kept.unflatten(1, (positions, k))

    def _remember(self, chosen: Tensor, kept: Tensor) -> None:
        """Add to the load: the tokens of each expert, the dropped pairs, all pairs."""
        if not self.context.recording:
            return
        counts = F.one_hot(chosen.flatten(), self.settings.num_experts).sum(0).double()
        numbers = counts.new_tensor([float((~kept).sum()), float(kept.numel())])
        seen = torch.cat((counts, numbers))
        self.load = seen if self.load is None else self.load + seen

    def _auxiliary(self, logits: Tensor, shares: Tensor, chosen: Tensor) -> Tensor | None:
        """The balance loss E sum of f_e P_e, and the mean of squared logarithms of sums."""
        settings = self.settings
        samples, positions = self.context.sizes(*logits.shape[:2])
        tokens = samples * positions
        parts = []
        if settings.balance_coef:
            counts = F.one_hot(chosen, settings.num_experts).sum((1, 2)).to(shares.dtype)  # [B, E]
        if settings.balance_coef and settings.balance_per_sequence:
            fractions = counts / (positions * settings.num_chosen)
            of_samples = (fractions * shares.sum(1) / positions).sum(-1) * settings.num_experts
            parts.append(settings.balance_coef * of_samples.sum() / samples)
        elif settings.balance_coef:
            total = self.context.sum_tokens(counts.sum(0))
            fractions = total / (tokens * settings.num_chosen)
            means = shares.sum((0, 1)) / tokens
            parts.append(settings.balance_coef * settings.num_experts * (fractions * means).sum())
        if settings.z_coef:
            parts.append(settings.z_coef * logits.logsumexp(-1).square().sum() / tokens)
        return torch.stack(parts).sum() if parts else None


def _ranked(scores: Tensor) -> Tensor:
    """[B, L, ...] -> the positions along L, best score first.

    Scores whose upper half of digits is equal differ by rounding alone: the first comes first.
    """
    digits = 1 - round(math.log2(torch.finfo(scores.dtype).eps))
    mantissa, exponent = torch.frexp(scores)
    upper = torch.ldexp((mantissa * 2.0 ** (digits // 2)).round(), exponent)
    return upper.sort(dim=1, descending=True, stable=True).indices


class PlainAdapted(nn.Module):
    """A linear layer [..., in] -> [..., out] with an adapter, LoRA or DoRA.

    Sources: Hu et al. 2021, equation 3; Liu et al. 2024, equation 5.
    """

    def __init__(self, layer: Any, settings: JsonMapping) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features = layer.lora_A.in_features
        self.out_features = layer.lora_B.out_features
        for name, child in layer.named_children():
            self.add_module(name, child)
        self._adapter = layer.adapter
        self._scale = _scale(layer.adapter, settings)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the adapter's part: [..., in] -> [..., out]."""
        children: dict[str, Any] = dict(self.named_children())
        a, b = (children[name].weight for name in ("lora_A", "lora_B"))
        weight = self.weight.t() if self._adapter.transposed else self.weight
        dropped = F.dropout(x, self._adapter.dropout, self.training)
        delta = self._scale * (dropped @ a.t() @ b.t())
        base = x @ weight.t()
        if self._adapter.kind == "dora":
            norms = (weight + self._scale * (b @ a)).detach().square().sum(1).sqrt()
            factor = children["lora_magnitude_vector"].weight / norms
            base = base + (factor - 1) * (dropped @ weight.t())
            delta = factor * delta
        return base + delta if self.bias is None else base + delta + self.bias


def _scale(adapter: Any, settings: JsonMapping) -> float:
    """The factor of an adapter's product, from the config where that says it."""
    if settings.get("weights") is not None:
        scale: float = adapter.scale
        return scale
    alpha = settings.get("alpha")
    return 1.0 if alpha is None else float(alpha / settings.get("rank", adapter.rank))


class PlainAdaptedExperts(nn.Module):
    """Experts of a library, which compute by their own code with the sums W + s B A.

    Source: Hu et al. 2021, equation 3, for each expert.
    """

    def __init__(self, experts: Any, settings: JsonMapping) -> None:
        super().__init__()
        bare = copy.copy(experts)
        bare._modules = {key: one for key, one in experts._modules.items() if key[:5] != "lora_"}
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = vars(experts)[table].items()
            others = ((key, hook) for key, hook in hooks if hook not in (put_sums, put_back))
            vars(bare)[table] = OrderedDict(others)
        self._parameters.update(experts._parameters)
        self._modules.update(experts._modules)
        self._bare = (bare,)  # no child, so that its parameters have one name
        self._adapter = experts.adapter
        self._settings = settings

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The output of the experts, [T, D] or [R, out], for their own arguments."""
        sums = _summed(self, self._adapter, self._settings)
        return functional_call(self._bare[0], sums, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._bare[0], name)


def _summed(experts: Any, adapter: Any, settings: JsonMapping) -> dict[str, Tensor]:
    """Every adapted weight of packed experts, one expert after the other: W_e + s B_e A_e."""
    scale = _scale(adapter, settings)
    children: dict[str, Any] = dict(experts.named_children())
    sums = {}
    for key in adapter.keys:
        a, b = (children[name][key].weight for name in ("lora_A", "lora_B"))
        number = len(a) // adapter.rank
        weight = getattr(experts, key)
        made = []
        for expert in range(number):
            own_a = a[expert * adapter.rank : (expert + 1) * adapter.rank]
            delta = scale * (b[:, expert::number] @ own_a)
            made.append(weight[expert] + (delta.T if adapter.transposed else delta))
        sums[key] = torch.stack(made)
    return sums
