"""Packed experts of Hugging Face families: which are found, and that their rows may be computed
apart.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.mesh import Mesh
from plait.models import packed_experts
from plait.parallel import expert
from plait.parallel.expert import AllToAllGroups
from tests.helpers.threaded import threaded

E, D, INNER = 4, 8, 12


class Sum(nn.Module):
    """Gated experts with biases, as the library calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, D, 2 * INNER))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * INNER))
        self.down_proj = nn.Parameter(torch.randn(E, INNER, D))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            token, choice = torch.where(chosen == index)
            inner = tokens[token] @ self.gate_up_proj[index] + self.gate_up_proj_bias[index]
            gate, up = inner.chunk(2, -1)
            result = (gate.clamp(max=1.0).sigmoid() * up) @ self.down_proj[index]
            total = total.index_add(0, token, result * weights[token, choice, None])
        return total


class Sorted(Sum):
    """Every token once for each expert."""

    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        inner = torch.bmm(rows.view(self.gate_up_proj.shape[0], -1, D), self.gate_up_proj)
        gate, up = inner.chunk(2, -1)
        return torch.bmm(gate.sigmoid() * up, self.down_proj).view(-1, D)


class Product(Sum):
    """Weights that an expert does not only multiply its result by."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, chosen, weights.square())


class Rows(nn.Module):
    """The matrices of a `Flat`, one expert behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E * INNER, D))
        self.down = nn.Parameter(torch.randn(E * INNER, D))


class Flat(nn.Module):
    """Experts whose matrices are a child's, and whose result has a dim more (DBRX)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.mlp = Rows()

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            token, choice = torch.where(chosen == index)
            up = self.mlp.up.view(-1, INNER, D)[index]
            down = self.mlp.down.view(-1, INNER, D)[index]
            result = (tokens[token] @ up.T).sigmoid() @ down
            total = total.index_add(0, token, result * weights[token, choice, None])
        return total.view(len(tokens), -1, D)


class Longer(nn.Module):
    """Choices behind the experts give the token back (LongCat)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_routed_experts = E
        self.up_proj = nn.Parameter(torch.randn(E + 2, INNER, D))
        self.down_proj = nn.Parameter(torch.randn(E, D, INNER))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for index in range(E + 2):
            token, choice = torch.where(chosen == index)
            result = tokens[token]
            if index < self.num_routed_experts:
                result = (result @ self.up_proj[index].T).sigmoid() @ self.down_proj[index].T
            total = total.index_add(0, token, result * weights[token, choice, None])
        return total


class Matrix(nn.Module):
    """One matrix of each expert, on rows that are sorted (JetMoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.weight = nn.Parameter(torch.randn(E, INNER, D))

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        parts = rows.split(sizes)
        return torch.cat([parts[i] @ self.weight[i].T for i in range(self.num_experts)])


class Net(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 1 chooses expert 0 alone, so that another rank may get no rows."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(5, D, dtype=torch.float64, generator=generator)
    chosen = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 1], [1, 2]]) * (1 - rank)
    return tokens, chosen, torch.rand(5, 2, dtype=torch.float64, generator=generator)


def call(module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, chosen, weights = given
    if isinstance(module, Sorted):
        return module(tokens.repeat(E, 1))
    if isinstance(module, Matrix):
        return module(tokens, [2, 0, 1, 2] if chosen.any() else [5, 0, 0, 0])
    if isinstance(module, Longer):
        chosen = chosen * 2  # 4 is behind the experts
    return module(tokens, chosen, weights).view_as(tokens)


@pytest.mark.parametrize("kind", [Sum, Sorted, Flat, Longer, Matrix])
def test_rows_computed_by_other_ranks_equal_one_device(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    whole = kind().double()
    expected = [call(whole, tokens_of(rank)) for rank in range(2)]
    sum(out.square().sum() for out in expected).backward()  # type: ignore[union-attr]

    def rank(world: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = Net(copy.deepcopy(whole))
        model.zero_grad()
        split = expert.apply(model, AllToAllGroups(world.axis("ep")))
        module = model.experts
        for key, param in list(module.named_parameters()):
            owner, _, last = key.rpartition(".")
            if f"experts.{key}" not in split.parts:
                assert isinstance(module, Longer) and key == "up_proj"
                continue
            box = split.parts[f"experts.{key}"].box
            part = whole.get_parameter(key).detach()[box.offset[0] :][: box.extent[0]]
            assert param.shape == part.shape
            module.get_submodule(owner)._parameters[last] = nn.Parameter(part.clone())
        given = tokens_of(world.rank)
        out = call(module, (given[0].requires_grad_(), *given[1:]))
        out.square().sum().backward()
        return out.detach(), {key: p.grad for key, p in module.named_parameters()}

    found = threaded(2, rank, plan=Mesh(dp=2, ep=2))
    for rank_index, (out, _) in enumerate(found):
        torch.testing.assert_close(out, expected[rank_index].detach(), rtol=1e-11, atol=1e-12)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            grads = [grads[key] for _, grads in found]
            is_whole = grads[0] is not None and grads[0].shape == param.shape
            parts = sum(grads) if is_whole else torch.cat(grads)
            torch.testing.assert_close(parts, param.grad, rtol=1e-11, atol=1e-12)


def test_what_is_no_sum_of_experts_is_refused_by_name() -> None:
    assert set(packed_experts.find(Net(Sum()))) == {"experts"}
    assert not packed_experts.find(Net(Product()))

    def rank(world: Any) -> None:
        with pytest.raises(ModelError, match=r"none that it knows \('experts' is a Product\)"):
            expert.apply(Net(Product()), AllToAllGroups(world.axis("ep")))
        odd = Sum()
        odd.num_experts = 3
        for key, param in odd.named_parameters():
            odd._parameters[key] = nn.Parameter(torch.randn(3, *param.shape[1:]))
        with pytest.raises(ModelError, match="'experts' has 3 experts, which ep2 does not divide"):
            expert.apply(Net(odd), AllToAllGroups(world.axis("ep")))

    threaded(2, rank, plan=Mesh(dp=2, ep=2))


def test_a_list_of_experts_is_refused_with_what_a_module_of_them_is() -> None:
    lists = nn.ModuleDict({"ffns": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    named = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})

    def rank(world: Any) -> None:
        groups = AllToAllGroups(world.axis("ep"))
        with pytest.raises(ModelError, match=r"'experts' is a list of 2 .*\[experts, .*up_"):
            expert.apply(named, groups)
        with pytest.raises(ModelError, match="has none; leave ep out or give it num_local_experts"):
            expert.apply(lists, groups)

    threaded(2, rank, plan=Mesh(dp=2, ep=2))
