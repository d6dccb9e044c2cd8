"""Routers and experts against plain loops: every variant, and the cases at the edge."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait import products
from plait.errors import ModelError
from plait.models import gated
from plait.models.experts import DispatchHandle, Exchange, Experts, MixtureOfExperts
from plait.models.grouped import METHODS, grouped_product, kernel_takes
from plait.models.permute import add_up, inverse, permute, to_rows
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router, best_first, place_in_group
from plait.products import Products, operations

D = 6
E = 4
K = 2


def router(**keys: Any) -> Router:
    torch.manual_seed(0)
    made = Router(
        D, RouterSettings(**{"num_experts": E, "num_chosen": K, **keys}), std=0.7
    ).double()
    if made.noise_weight is not None:
        torch.nn.init.normal_(made.noise_weight)
    return made


def mixture(**keys: Any) -> MixtureOfExperts:
    made = router(**keys)
    return MixtureOfExperts(made, Experts(E, D, 5, std=0.5, std_residual=0.5).double(), None)


def tokens(num_samples: int = 3, num_positions: int = 8) -> Tensor:
    return torch.randn(
        num_samples,
        num_positions,
        D,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )


def by_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """The layer, pair by pair."""
    torch.manual_seed(2)
    routing = layer.router(x)
    flat = x.flatten(0, 1)
    experts = layer.experts
    out = torch.zeros_like(flat)
    for token, expert, weight in zip(routing.token, routing.expert, routing.weight, strict=True):
        hidden = torch.nn.functional.silu(experts.gate[expert] @ flat[token]) * (
            experts.up[expert] @ flat[token]
        )
        out[token] += weight * (experts.down[expert] @ hidden)
    return out.view_as(x)


ROUTERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "not normalised": {"normalise": False, "scale": 2.5},
    "sigmoid": {"scoring": "sigmoid"},
    "groups": {"method": "group_limited_greedy", "num_groups": 2},
    "groups, bias": {
        "method": "noaux_tc",
        "scoring": "sigmoid",
        "num_groups": 2,
        "bias_speed": 0.1,
    },
    "noisy": {"method": "noisy"},
    "expert choice": {"method": "expert_choice"},
    "expert choice, half": {"method": "expert_choice", "capacity_factor": 0.5},
    "drop by score": {"capacity_factor": 0.5},
    "drop by position": {"capacity_factor": 0.75, "drop_by": "position"},
    "tiny capacity": {"capacity_factor": 0.01},
    "all experts": {"num_chosen": E},
    "one expert": {"num_chosen": 1},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_layer_equals_a_loop_over_pairs(name: str) -> None:
    layer = mixture(**ROUTERS[name])
    x = tokens()
    torch.manual_seed(2)
    out = layer(x)
    torch.testing.assert_close(out, by_loop(layer, x), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()), allow_unused=True)
    expected = torch.autograd.grad(
        by_loop(layer, x).square().sum(), list(layer.parameters()), allow_unused=True
    )
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_positions", [1, 2, 3])
@pytest.mark.parametrize("name", ROUTERS)
def test_fewer_tokens_than_experts(name: str, num_positions: int) -> None:
    layer = mixture(**ROUTERS[name])
    x = tokens(1, num_positions)
    torch.manual_seed(2)
    torch.testing.assert_close(layer(x), by_loop(layer, x), rtol=1e-12, atol=1e-12)


def test_an_expert_that_gets_nothing_and_one_that_gets_everything() -> None:
    layer = mixture(num_chosen=1)
    x = tokens().abs()
    with torch.no_grad():
        layer.router.weight[:] = -1.0
        layer.router.weight[2] = 1.0
    out = layer(x)
    out.sum().backward()
    assert layer.router.load is not None and layer.router.load.tolist() == [0, 0, 24, 0, 0, 24]
    torch.testing.assert_close(out, by_loop(layer, x), rtol=1e-12, atol=1e-12)
    grad = layer.experts.gate.grad
    assert grad is not None and grad[2].abs().min() > 0 and not grad[[0, 1, 3]].any()


@pytest.mark.parametrize("drop_by", ["score", "position"])
def test_overflow_is_dropped_counted_and_adds_nothing(drop_by: str) -> None:
    made = router(capacity_factor=0.5, drop_by=drop_by)
    x = tokens()
    capacity = math.ceil(0.5 * K * 8 / E)
    routing = made(x)
    free = router()(x)
    scores = (x @ made.weight.t()).softmax(-1).flatten(0, 1).detach()
    kept = {(int(t), int(e)) for t, e in zip(routing.token, routing.expert, strict=True)}
    pairs = [(int(t), int(e)) for t, e in zip(free.token, free.expert, strict=True)]
    for sample in range(3):
        for expert in range(E):
            mine = [t for t, e in pairs if e == expert and t // 8 == sample]
            mine.sort(key=lambda t: -float(scores[t, expert]) if drop_by == "score" else t)
            assert {t for t, e in kept if e == expert and t // 8 == sample} == set(mine[:capacity])
    assert made.load is not None and made.load[-2:].tolist() == [len(pairs) - len(kept), len(pairs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_differ_by_rounding_alone_are_taken_in_order(dtype: torch.dtype) -> None:
    """And only these: a choice by the last bit would depend on how the work was split."""
    bit = torch.finfo(dtype).eps
    scores = torch.tensor([0.3, 0.7, 0.3 * (1 + 2 * bit), 0.7 * (1 - 2 * bit), 0.31], dtype=dtype)
    assert best_first(scores[None])[0].tolist() == [1, 3, 4, 0, 2]
    assert best_first(scores.flip(0)[None])[0].tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize(
    "keys",
    [{"method": "expert_choice"}, {"capacity_factor": 0.5}],
    ids=["expert choice", "capacity"],
)
def test_of_tokens_that_are_equal_the_first_is_taken(keys: dict[str, Any]) -> None:
    one = tokens(1, 1)
    aside = 1 + torch.finfo(one.dtype).eps * torch.tensor(
        [0, 3, -1, 2, 0, 1, 4, -2], dtype=one.dtype
    )
    routing = router(**keys)(one * aside[None, :, None])
    for expert in routing.expert.unique():
        mine = routing.token[routing.expert == expert]
        assert sorted(mine.tolist()) == list(range(len(mine)))


def test_shared_experts_compute_while_tokens_travel() -> None:
    told: list[str] = []

    class Told(DispatchHandle):
        def wait(self) -> tuple[Tensor, list[int]]:
            told.append("wait")
            return super().wait()

    class Telling(Exchange):
        def dispatch(self, rows: Tensor, counts: Tensor) -> DispatchHandle:
            told.append("start")
            return Told(rows, counts.tolist())

    layer = mixture()
    layer.shared = nn.Linear(D, D).double()
    layer.shared.register_forward_hook(lambda *_: told.append("shared"))
    layer.exchange = Telling()
    layer(tokens())
    assert told == ["start", "shared", "wait"]


def test_gathers_have_the_gradients_of_indexing() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])  # of 3 tokens with 2 experts each
    x, rows = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (3, 6))
    weight = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    back = inverse(order)
    assert torch.equal(to_rows(x, order, back), x[order // 2]) and torch.equal(
        permute(rows, order), rows[order]
    )
    pairs = rows[back].view(3, 2, D) * weight[..., None]
    torch.testing.assert_close(add_up(rows, weight, order, back), pairs.sum(1))
    assert torch.autograd.gradcheck(lambda x: to_rows(x, order, back), (x,))
    assert torch.autograd.gradcheck(lambda rows: permute(rows, order), (rows,))
    assert torch.autograd.gradcheck(
        lambda rows, weight: add_up(rows, weight, order, back), (rows, weight)
    )


def test_groups_limit_the_experts() -> None:
    made = router(method="group_limited_greedy", num_groups=2)
    x = tokens()
    chosen = made(x).expert.view(-1, K)
    assert torch.equal(chosen[:, 0] // 2, chosen[:, 1] // 2)
    best = (x @ made.weight.t()).flatten(0, 1).argmax(-1)
    assert torch.equal(best // 2, chosen[:, 0] // 2)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    made = router(bias_speed=0.1, num_chosen=1, normalise=False)
    x = tokens()
    assert made.bias is not None
    made.bias[:] = torch.tensor([0.0, 0.0, 0.0, 9.0])
    routing = made(x)
    assert set(routing.expert.tolist()) == {3}
    torch.testing.assert_close(routing.weight, (x @ made.weight.t()).softmax(-1)[..., 3].flatten())
    made.balance(made.load)
    torch.testing.assert_close(made.bias, torch.tensor([0.1, 0.1, 0.1, 8.9], dtype=torch.float64))
    assert made.load is None


def test_balance_loss_is_one_when_balanced_and_grows_with_skew() -> None:
    made = router(balance_coef=1.0)
    x = tokens()
    with torch.no_grad():
        made.weight.zero_()
    made(x)
    assert made.auxiliary is not None
    assert made.auxiliary.item() == pytest.approx(1.0)
    skewed = router(balance_coef=1.0, num_chosen=1)
    with torch.no_grad():
        skewed.weight.zero_()
        skewed.weight[0] = 100.0
    skewed(x.abs())
    assert skewed.auxiliary is not None and skewed.auxiliary.item() == pytest.approx(E)


def test_auxiliary_losses_equal_their_formulae() -> None:
    made = router(balance_coef=0.3, z_coef=0.2)
    x = tokens()
    chosen = made(x).expert
    logits = x @ made.weight.t()
    share = torch.bincount(chosen, minlength=E) / len(chosen)
    expected = (
        0.3 * E * (share * logits.softmax(-1).mean((0, 1))).sum()
        + 0.2 * logits.logsumexp(-1).square().mean()
    )
    torch.testing.assert_close(made.auxiliary, expected)
    by_sequence = router(balance_coef=0.3, balance_per_sequence=True)
    by_sequence(x)
    parts = []
    for sample in range(3):
        one = router(balance_coef=0.3)
        one(x[sample : sample + 1])
        parts.append(one.auxiliary)
    torch.testing.assert_close(by_sequence.auxiliary, sum(parts) / 3)


def test_nothing_is_counted_in_evaluation() -> None:
    made = router(balance_coef=1.0, z_coef=1.0, method="noisy").eval()
    first = made(tokens())
    again = made(tokens())
    assert made.load is None and made.auxiliary is None and torch.equal(first.weight, again.weight)


@pytest.mark.parametrize("counts", [(7, 0, 12, 3), (0, 0, 0, 22), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_experts_chunk_by_chunk_compute_the_same(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated, "CHUNK_ROWS", 5)
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 6, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
        for shape in ((8, 6), (8, 6), (6, 8))
    ]
    grad = torch.randn(sum(counts), 6, dtype=torch.float64)
    found = []
    for method in ("padded", "loop"):
        out = gated.gated_experts(rows, weights, counts, method)
        found.append([out, *torch.autograd.grad(out, [rows, *weights], grad)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


class Seen(TorchDispatchMode):
    """The operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", ["rule", "torch"])
def test_experts_multiply_as_they_are_told_also_after_a_journey(rule: str) -> None:
    experts = Experts(2, 96, 96, std=0.1, std_residual=0.1)
    experts.products = Products(rule)
    arrived = pickle.loads(pickle.dumps(experts))
    with Seen() as seen:
        arrived(torch.randn(400, 96), (300, 100)).sum().backward()
    assert seen.operations & operations() == (operations() if rule == "rule" else set())


def test_few_shapes_reach_the_library_that_keeps_a_kernel_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a router deals: its counts differ at every step, and a kernel stays for good."""
    asked: set[tuple[int, ...]] = set()
    taken = products._onednn()

    def call(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.add((*x.shape, *weight.shape))
        found: torch.Tensor = taken(x, weight, *rest)
        return found

    monkeypatch.setattr(products, "_onednn", lambda: None if taken is None else call)
    monkeypatch.setattr(gated, "CHUNK_ROWS", 256)
    experts = Experts(2, 192, 192, std=0.1, std_residual=0.1)
    for first in range(130, 700, 57):
        experts(torch.randn(900, 192, requires_grad=True), (first, 900 - first)).sum().backward()
    assert bool(asked) == (taken is not None)
    assert len(asked) <= 2 * 256 // gated.STEP_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 0, 6), (0, 0, 0, 0), (0, 0, 0, 1), (2, 2, 2, 2)])
def test_every_method_of_the_grouped_product_agrees(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    expected = torch.cat([part @ weight[i].t() for i, part in enumerate(rows.split(counts))])
    grads = torch.autograd.grad(expected.square().sum(), (rows, weight))
    for method in METHODS:
        if method == "kernel" and not kernel_takes(weight):
            continue
        out = grouped_product(rows, weight, counts, method)
        loose = {"rtol": 0.05, "atol": 0.5} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out, expected, **loose)  # type: ignore[arg-type]
        for grad, other in zip(
            torch.autograd.grad(out.square().sum(), (rows, weight)), grads, strict=True
        ):
            torch.testing.assert_close(grad, other, **loose)  # type: ignore[arg-type]


def test_measuring_names_a_time_for_each_method_that_runs() -> None:
    assert gated.measure(torch.randn(2, 4, 8), (3, 2), repeats=1).keys() == set(METHODS)
    assert gated.measure(torch.randn(2, 4, 8).double(), (3, 2), repeats=1).keys() == {
        "loop",
        "padded",
    }


def test_places_in_groups() -> None:
    groups = torch.randint(0, 3, (4, 17))
    for row, places in zip(groups.tolist(), place_in_group(groups).tolist(), strict=True):
        assert places == [row[:i].count(group) for i, group in enumerate(row)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "gredy"}, "topk_method = 'gredy'"),
        ({"num_chosen": 5}, "num_experts_per_tok = 5 must be from 1 to num_local_experts = 4"),
        ({"num_groups": 3}, "n_group = 3 must divide"),
        ({"num_groups": 4}, "hold fewer than 2 experts"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0 must be above 0"),
        ({"method": "expert_choice", "balance_coef": 0.1}, "balanced by itself"),
    ],
)
def test_settings_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        router(**keys)
