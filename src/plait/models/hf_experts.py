"""Mixtures of experts in Hugging Face models (Mixtral, Qwen-MoE), as mixtures of this project over
the same parameters.

So that experts can be split over ranks and their load be seen. Names and shapes of parameters stay
the library's. Trying decides whether a block is understood. A small one of its class and config
must give equal results, else the block stays unchanged.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.experts import Exchange, ExpertWeights, MixtureOfExperts, as_it_is
from plait.models.grouped import default_method
from plait.models.layers import start_normal
from plait.models.low_rank import product
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}


class FusedExperts(ExpertWeights):
    """E gated MLPs whose first two matrices are one: `gate_up_proj` [E, 2 I, D], `down_proj` [E, D,
    I].
    """

    def __init__(self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, std: float) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.std = std

    @property
    def first(self) -> Tensor:
        """The weight of the first product, [E, 2 I, D]."""
        return self.gate_up_proj

    def reset_parameters(self) -> None:
        """Draw both weights from a normal law of deviation `std`, as the library does."""
        start_normal(self.gate_up_proj, self.std)
        start_normal(self.down_proj, self.std)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [R, D] sorted by expert -> [R, D]."""
        gate_up, down = self.at_work("gate_up_proj", "down_proj")
        method = self.method or default_method(gate_up.weight)
        gate, up = product(rows, gate_up, counts, method).chunk(2, dim=-1)
        return product(F.silu(gate) * up, down, counts, method)


class AdoptedMixture(MixtureOfExperts):
    """[B, S, D] -> [B, S, D]. The children are called as in the library: `gate` is the router."""

    def __init__(self, block: Any, normalise: bool, std: float) -> None:
        nn.Module.__init__(self)
        num_experts, hidden_size = block.gate.weight.shape
        settings = RouterSettings(num_experts, block.gate.top_k, normalise=normalise)
        self.gate = Router(hidden_size, settings, std=std)
        self.gate.weight = block.gate.weight
        self.experts = FusedExperts(block.experts.gate_up_proj, block.experts.down_proj, std)
        if hasattr(block, "shared_expert"):
            self.shared_expert = block.shared_expert
            self.shared_expert_gate = block.shared_expert_gate
        self.exchange = Exchange()
        self.enter = as_it_is
        self.leave = as_it_is

    @property
    def router(self) -> Router:  # type: ignore[override]
        """By the name that the library has for it."""
        return self.gate

    @property
    def shared(self) -> Any:  # type: ignore[override]
        """The expert that every token shares, weighed by a gate of its own."""
        if not hasattr(self, "shared_expert"):
            return None
        return lambda x: F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def adopt(model: Any) -> None:
    """Put mixtures of this project in the place of the library's blocks, where they are
    understood.
    """
    tried: dict[type, bool | None] = {}
    std = float(getattr(model.config, "initializer_range", 0.02))
    for parent in list(model.modules()):
        for name, block in list(parent.named_children()):
            if _looks_like_one(block):
                if type(block) not in tried:
                    tried[type(block)] = _normalises(type(block), model.config)
                normalise = tried[type(block)]
                if normalise is not None:
                    setattr(parent, name, AdoptedMixture(block, normalise, std))


def roles(model: nn.Module) -> dict[str, str]:
    """The roles of the modules inside adopted mixtures, by name."""
    role_of: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdoptedMixture):
            role_of |= {f"{name}.gate": "router", f"{name}.experts": "experts"}
            if module.shared is not None:
                ends = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
                role_of |= {f"{name}.shared_expert.{end}": role for end, role in ends.items()}
                role_of[f"{name}.shared_expert_gate"] = "replicated"
    return role_of


def _looks_like_one(block: Any) -> bool:
    if not (hasattr(block, "gate") and hasattr(block, "experts")):
        return False
    children = {name for name, _ in block.named_children()}
    shared = {"shared_expert", "shared_expert_gate"}
    return (
        children - shared == {"gate", "experts"}
        and children & shared in (set(), shared)
        and hasattr(block.gate, "top_k")
        and set(block.gate._parameters) == {"weight"}
        and set(block.experts._parameters) == {"gate_up_proj", "down_proj"}
    )


def _normalises(kind: type, config: Any) -> bool | None:
    """Whether the weights of a token sum to one, found by trying; None for a block that computes
    something else.
    """
    small = copy.deepcopy(config)
    for key, size in SMALL.items():
        if hasattr(small, key):
            setattr(small, key, size)
    try:
        small._experts_implementation = "eager"
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), torch.device("cpu"):
            block = kind(small).eval().float()
            for param in block.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
            x = torch.randn(2, 3, SMALL["hidden_size"], generator=generator)
            for normalise in (True, False):
                if torch.allclose(
                    block(x), AdoptedMixture(block, normalise, 0.02).eval()(x), rtol=1e-3, atol=1e-4
                ):
                    return normalise
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return None


def a_layer(model: nn.Module) -> str:
    """The first layer of the first block that mixes features, with its class."""
    for name, module in model.named_modules():
        if re.search(r"\.\d+\.\w+$", name) and "Norm" not in type(module).__name__:
            return f"'{name}' ({type(module).__name__})"
    return type(model).__name__
