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
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from plait.models.adapter_parts import PARTS
from plait.models.experts import Exchange, MixtureOfExperts
from plait.models.permute import counted, inverse
from plait.values import PyTree

FIRST = ("gate_up_proj", "up_proj")
LAST = "down_proj"
ROUTED = 3  # arguments: tokens, choices, weights
PRODUCT = 2  # arguments: rows sorted by expert, rows of each; one matrix of each expert
SORTED = 1  # argument: every token once for each expert, sorted by expert
MATRIX = {"weight", "bias"}  # the parameters of a product
KEPT = "has_part_of_experts"
"""An attribute of the class of a module: its parameters that hold a part of the experts."""


class PackedExperts:
    """The experts of one module of a model.

    Attributes:
        module: the library's own.
        keys: names of its parameters that have a part for each expert; some are a child's.
        longer: names of those with parts behind the experts too, which nothing computes with. They
            stay whole.
        num_experts: of all ranks.
        exchange: sends rows to where their experts are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_experts = _num_experts(module)
        self.longer = list(_longer(module))
        self.keys = list(_parts(module, self.num_experts))
        self.exchange = Exchange()
        self._first = 0
        self._here = self.num_experts
        self._own: PyTree = type(module).forward
        self._num_arguments = _num_arguments(module)

    def keep(self, num_experts: int, exchange: Exchange, first: int = 0) -> None:
        """Compute `num_experts` here, from number `first` on, whose parameters the module has now;
        the rest by exchange.

        The module gets a class with this forward, so that a copy computes with its own parameters.
        """
        self._first, self._here = first, num_experts
        self.exchange = exchange
        for part in self.module.modules():
            _count(part, self.num_experts, num_experts)

        def forward(owner: nn.Module, *args: PyTree, **kwargs: PyTree) -> Tensor:
            return self.forward(owner, *args, **kwargs)

        for name, keys in self.keys_by_owner().items():
            _subclass(self.module.get_submodule(name), **{KEPT: tuple(keys)})
        _subclass(self.module, forward=forward)

    def keys_by_owner(self) -> dict[str, list[str]]:
        """The keys of the module and of its children, by the name inside the module."""
        keys: dict[str, list[str]] = {}
        for owner, _, key in (name.rpartition(".") for name in self.keys):
            keys.setdefault(owner, []).append(key)
        return keys

    def forward(self, owner: nn.Module, *args: PyTree, **kwargs: PyTree) -> Tensor:
        """The module's own, over the experts of all ranks; `owner` is it, or a copy of it.

        The result has the shape of the tokens [T, D]; of a product, rows [R, in] give [R, out].
        Collective where experts are on several ranks.
        """
        given = [*args, *kwargs.values()]
        if self._num_arguments == SORTED:
            return self._sorted(owner, given[0])
        if self._num_arguments == PRODUCT:
            return self._product(owner, *given)
        tokens, chosen, weights = given[:ROUTED]
        return self._routed(owner, tokens, chosen, weights)

    def _routed(self, owner: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = tokens.reshape(-1, tokens.shape[-1])
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True)
        counts = counted(expert, self.num_experts)
        routed = flat[order // chosen.shape[-1]]
        if self.longer:  # a choice behind the experts is computed where it is
            routed, rest = routed.tensor_split([int(counts.sum())])
        handle = self.exchange.dispatch(routed, counts)
        rows = handle.combine(self._compute(owner, *handle.wait()))
        if self.longer:
            rows = torch.cat((rows, self._behind(owner, rest)))
        weighted = rows[inverse(order)] * weights.reshape(-1, 1).to(rows.dtype)
        return weighted.view(len(flat), -1, flat.shape[-1]).sum(1).view_as(tokens)

    def _sorted(self, owner: nn.Module, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        counts = torch.full((self.num_experts,), len(flat) // self.num_experts, device=rows.device)
        handle = self.exchange.dispatch(flat, counts)
        arrived, _ = handle.wait()
        return handle.combine(self._own(owner, arrived)).view_as(rows)

    def _product(self, owner: nn.Module, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """One matrix of each expert: the rows that come back have its output size."""
        counts = torch.as_tensor(sizes, dtype=torch.int64, device=rows.device)
        handle = self.exchange.dispatch(rows, counts)
        arrived, here = handle.wait()
        return handle.combine(self._own(owner, arrived, list(here)))

    def _compute(self, owner: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows sorted by expert -> their results. Every rank is part of every backward, so rows
        that were not sent have a graph too.
        """
        if not len(rows):
            nothing = rows.new_zeros(())
            for key in self.keys:
                weight: Tensor = operator.attrgetter(key)(owner)  # with its adapter's share
                nothing = nothing + weight.sum() * 0
            return rows + nothing
        repeats = torch.tensor(counts, device=rows.device)
        expert = torch.arange(len(repeats), device=rows.device).repeat_interleave(repeats)
        return self._alone(owner, rows, expert)

    def _behind(self, owner: nn.Module, rows: Tensor) -> Tensor:
        """Rows of choices behind the experts, which are no expert's: as the module has them."""
        expert = torch.full((len(rows),), self._here, device=rows.device)
        return self._alone(owner, rows, expert)

    def _alone(self, owner: nn.Module, rows: Tensor, expert: Tensor) -> Tensor:
        """The module's own forward on rows of one choice each, with a weight of one.

        Where choices behind the experts exist, one of them is the second choice, with a weight of
        zero: LongCat's forward takes two choices at least.
        """
        chosen, weights = expert[:, None], rows.new_ones(len(rows), 1)
        if self.longer:
            chosen = torch.cat((chosen, torch.full_like(chosen, self._here)), 1)
            weights = torch.cat((weights, torch.zeros_like(weights)), 1)
            owner = copy.copy(owner)
            tensors: PyTree = owner._parameters
            from_first = {key: tensors[key][self._first :] for key in self.longer}
            owner._parameters = {**tensors, **from_first}
        result: Tensor = self._own(owner, rows, chosen, weights)
        return result.view_as(rows)


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
    return _num_experts(module) > 1


def has_part(module: nn.Module, key: str) -> bool:
    """Whether a parameter of a module holds a part of packed experts, and other ranks the rest."""
    return key in getattr(type(module), KEPT, ())


def is_sum(module: nn.Module) -> bool:
    """Whether the forward is the weighted sum of experts that see rows alone, found by trying two
    of its size.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    config = getattr(module, "config", None)
    method = getattr(config, "_experts_implementation", None)
    if method is not None:
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            return _agrees(_of_two(module, _num_experts(module), draw), draw)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    finally:
        if method is not None:
            config._experts_implementation = method  # type: ignore[union-attr]


def _of_two(module: nn.Module, num_experts: int, draw: Callable[..., Tensor]) -> PyTree:
    """A copy with two experts, whose parameters are drawn on the host."""
    parts = _parts(module, num_experts)

    def copied(part: nn.Module, prefix: str) -> PyTree:
        small: PyTree = copy.copy(part)
        small._forward_pre_hooks = type(part._forward_pre_hooks)()
        small._parameters = dict(part._parameters)
        for key, param in part._parameters.items():
            if param is not None:
                rows = 2 * parts[prefix + key] if prefix + key in parts else param.shape[0]
                small._parameters[key] = nn.Parameter(draw(rows, *param.shape[1:]) / 4)
        _count(small, num_experts, 2)
        children = {key: child for key, child in part._modules.items() if child is not None}
        small._modules = {key: copied(child, f"{prefix}{key}.") for key, child in children.items()}
        return small

    return copied(module, "")


def _agrees(small: PyTree, draw: Callable[..., Tensor]) -> bool:
    by_rows = PackedExperts(small)
    hidden = _hidden_size(small)
    if by_rows._num_arguments == SORTED:
        rows = draw(6, hidden)
        return torch.allclose(by_rows.forward(small, rows), small(rows), rtol=1e-4, atol=1e-5)
    if by_rows._num_arguments == PRODUCT:
        rows = draw(5, hidden)
        apart = torch.cat((small(rows[:2], [2, 0]), small(rows[2:], [0, 3])))
        return torch.allclose(apart, small(rows, [2, 3]), rtol=1e-4, atol=1e-5)
    tokens = draw(3, hidden)
    chosen = torch.tensor([[0, 1], [1, 2 if by_rows.longer else 0], [1, 0]])
    weights = draw(3, 2)
    one = small(tokens, chosen, weights).view_as(tokens)
    return torch.allclose(
        by_rows.forward(small, tokens, chosen, weights), one, rtol=1e-4, atol=1e-5
    )


def _hidden_size(module: nn.Module) -> int:
    """The size that both the first matrix takes and the last one gives."""
    shapes = [param.shape for param in _matrices(module)]
    if len(shapes) == 1:
        return int(getattr(module, "input_size", shapes[0][-1]))
    return next(size for size in shapes[-1][1:] if size in shapes[0][1:])


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """The first and the last matrices; all where their names are others."""
    named = _own(module)
    known = [named[key] for key in (*FIRST, LAST) if key in named]
    return known or [param for param in named.values() if param.dim() > 1]


def _num_experts(module: nn.Module) -> int:
    """The experts that a module packs; 0 for a module of another kind."""
    arguments = _num_arguments(module)
    if arguments not in (ROUTED, PRODUCT, SORTED):
        return 0
    if arguments == PRODUCT:
        told = int(getattr(module, "num_experts", 0) or 0)
        is_matrix = _dims(module, "weight") == 3 and set(module._parameters) <= MATRIX
        rows = module.get_parameter("weight").shape[0] if is_matrix else 0
        return told if rows == told else 0
    first = [key for key in FIRST if _dims(module, key) == 3]
    if first and _dims(module, LAST) == 3:
        count = module.get_parameter(LAST).shape[0]
        extent = module.get_parameter(first[0]).shape[0]
        return count if extent == count or (extent > count and arguments == ROUTED) else 0
    return _num_flat(module) if arguments == ROUTED else 0


def _num_flat(module: nn.Module) -> int:
    """The experts of a module whose matrices lie one behind the other: [E x I, D] each."""
    count = getattr(module, "num_experts", 0)
    shapes = {tuple(param.shape) for param in _own(module).values()}
    if type(count) is not int or count < 1 or len(shapes) != 1:
        return 0
    (shape,) = shapes
    return count if len(shape) == 2 and shape[0] % count == 0 else 0


def _parts(module: nn.Module, num_experts: int) -> dict[str, int]:
    """Names of the parameters with a part for each expert, and the rows of a part."""
    flat = _num_flat(module)
    return {
        name: param.shape[0] // num_experts
        for name, param in _own(module).items()
        if param.dim() and (flat or param.shape[0] == num_experts)
    }


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module and its children, by name, without those of adapters."""
    return {
        name: param
        for name, param in module.named_parameters()
        if name.partition(".")[0] not in PARTS
    }


def _longer(module: nn.Module) -> Iterator[str]:
    """Names of a module's own parameters with parts behind those of its experts."""
    last = module._parameters.get(LAST)
    if last is not None:
        for key in FIRST:
            param = module._parameters.get(key)
            if param is not None and param.shape[0] > last.shape[0]:
                yield key


def _subclass(module: nn.Module, **table: object) -> None:
    """Give a module a class of its own kind and name with these attributes."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {**table, "__module__": kind.__module__})


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
