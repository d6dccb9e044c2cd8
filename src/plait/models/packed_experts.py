"""Experts of any Hugging Face family that packs them: one tensor [E, ...] for each matrix or bias.

Nearly every family calls them alike: `experts(tokens, chosen, weights)` is the weighted sum over
the chosen experts. Their arithmetic (gates, clamps, biases, norms) is left to their own
forward, which only gets fewer experts. Rows that came for one are its tokens, with a weight of one.
They are weighed where they came from. Whether that is the same is found by trying. Shapes: T
tokens, k choices of each, R rows, D hidden size, E experts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plait.models.experts import Exchange, MixtureOfExperts
from plait.models.permute import inverse
from plait.values import PyTree

FIRST = ("gate_up_proj", "up_proj")
LAST = "down_proj"
ROUTED = 3  # arguments: tokens, choices, weights
SORTED = 1  # argument: every token once for each expert, sorted by expert
KEPT = "has_part_of_experts"
"""An attribute of the class of a module that computes its part of the experts."""


class PackedExperts:
    """The experts of one module of a model.

    Attributes:
        module: the library's own.
        keys: names of its parameters that have a part for each expert.
        num_experts: of all ranks.
        exchange: sends rows to where their experts are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_experts = _num_experts(module)
        self.keys = [
            key
            for key, param in module._parameters.items()
            if param is not None and param.shape[0] == self.num_experts
        ]
        self.exchange = Exchange()
        self._own: PyTree = type(module).forward
        self._num_arguments = _num_arguments(module)

    def keep(self, num_experts: int, exchange: Exchange) -> None:
        """Compute `num_experts` here, whose parameters the module has now; the rest by exchange.

        The module gets a class with this forward, so that a copy computes with its own parameters.
        """
        module = self.module
        _count(module, self.num_experts, num_experts)
        self.exchange = exchange
        kind = type(module)

        def forward(owner: nn.Module, *args: PyTree, **kwargs: PyTree) -> Tensor:
            return self.forward(owner, *args, **kwargs)

        table = {"forward": forward, KEPT: True, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), table)

    def forward(self, owner: nn.Module, *args: PyTree, **kwargs: PyTree) -> Tensor:
        """The module's own, over the experts of all ranks; `owner` is it, or a copy of it."""
        given = [*args, *kwargs.values()]
        if self._num_arguments == SORTED:
            return self._sorted(owner, given[0])
        tokens, chosen, weights = given[:ROUTED]
        return self._routed(owner, tokens, chosen, weights)

    def _routed(self, owner: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = tokens.reshape(-1, tokens.shape[-1])
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.num_experts)
        token = order // chosen.shape[-1]
        handle = self.exchange.dispatch(flat[token], counts)
        rows = handle.combine(self._compute(owner, *handle.wait()))
        weighted = rows[inverse(order)] * weights.reshape(-1, 1).to(rows.dtype)
        return weighted.view(len(flat), -1, flat.shape[-1]).sum(1).view_as(tokens)

    def _sorted(self, owner: nn.Module, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        counts = torch.full((self.num_experts,), len(flat) // self.num_experts, device=rows.device)
        handle = self.exchange.dispatch(flat, counts)
        arrived, _ = handle.wait()
        return handle.combine(self._own(owner, arrived)).view_as(rows)

    def _compute(self, owner: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows sorted by expert -> their results. Every rank is part of every backward, so rows
        that nobody sent have a graph too.
        """
        if not len(rows):
            nothing = rows.new_zeros(())
            for key in self.keys:
                weight: Tensor = getattr(owner, key)  # with its adapter's share
                nothing = nothing + weight.sum() * 0
            return rows + nothing
        repeats = torch.tensor(counts, device=rows.device)
        expert = torch.arange(len(repeats), device=rows.device).repeat_interleave(repeats)
        result: Tensor = self._own(owner, rows, expert[:, None], rows.new_ones(len(rows), 1))
        return result


def find(model: nn.Module) -> dict[str, PackedExperts]:
    """The packed experts of a model that this project does not compute itself, by name."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            inside |= set(module.modules())
    understood: dict[type, bool] = {}
    packed = {}
    for name, module in model.named_modules():
        if module in inside or not is_packed(module):
            continue
        if type(module) not in understood:
            understood[type(module)] = is_sum(module)
        if understood[type(module)]:
            packed[name] = PackedExperts(module)
    return packed


def is_packed(module: nn.Module) -> bool:
    """Whether a module has the parameters and the arguments of packed experts."""
    first = [key for key in FIRST if _dims(module, key) == 3]
    if not first or _dims(module, LAST) != 3:
        return False
    same = module._parameters[first[0]].shape[0] == _num_experts(module)  # type: ignore[union-attr]
    return same and _num_arguments(module) in (ROUTED, SORTED)


def has_part(module: nn.Module) -> bool:
    """Whether a module computes its part of packed experts, and the others are on other ranks."""
    return bool(getattr(type(module), KEPT, False))


def is_sum(module: nn.Module) -> bool:
    """Whether the forward is the weighted sum of experts that see rows alone, found by trying two
    of its size.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    small: PyTree = copy.copy(module)
    small._forward_pre_hooks = type(module._forward_pre_hooks)()
    small._parameters = {
        key: param if param is None else nn.Parameter(draw(2, *param.shape[1:]) / 4)
        for key, param in module._parameters.items()
    }
    _count(small, _num_experts(module), 2)
    config = getattr(module, "config", None)
    method = getattr(config, "_experts_implementation", None)
    if method is not None:
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            return _agrees(small, draw)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    finally:
        if method is not None:
            config._experts_implementation = method  # type: ignore[union-attr]


def _agrees(small: PyTree, draw: Callable[..., Tensor]) -> bool:
    by_rows = PackedExperts(small)
    hidden = _hidden_size(small)
    if by_rows._num_arguments == SORTED:
        rows = draw(6, hidden)
        return torch.allclose(by_rows.forward(small, rows), small(rows), rtol=1e-4, atol=1e-5)
    tokens = draw(3, hidden)
    chosen = torch.tensor([[0, 1], [1, 0], [1, 0]])
    weights = draw(3, 2)
    one = small(tokens, chosen, weights)
    return torch.allclose(
        by_rows.forward(small, tokens, chosen, weights), one, rtol=1e-4, atol=1e-5
    )


def _hidden_size(module: nn.Module) -> int:
    """The size that both the first matrix takes and the last one gives."""
    first = next(key for key in FIRST if _dims(module, key) == 3)
    return next(
        size
        for size in module._parameters[LAST].shape[1:]  # type: ignore[union-attr]
        if size in module._parameters[first].shape[1:]  # type: ignore[union-attr]
    )


def _num_experts(module: nn.Module) -> int:
    return int(module._parameters[LAST].shape[0])  # type: ignore[union-attr]


def _dims(module: nn.Module, key: str) -> int:
    param = module._parameters.get(key)
    return 0 if param is None else param.dim()


def _num_arguments(module: nn.Module) -> int:
    """How many arguments the class's own forward takes: a decorator keeps its signature."""
    return len(inspect.signature(type(module).forward).parameters) - 1


def _count(module: nn.Module, before: int, after: int) -> None:
    """Tell a module how many experts it has now."""
    for key, value in vars(module).items():
        if "expert" in key and type(value) is int and value == before:
            setattr(module, key, after)
