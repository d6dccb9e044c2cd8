"""The small case of a term: a model with weights of ones, and a batch of small whole numbers.

The sizes follow from the term: each rank gets a few numbers of everything that the term divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.errors import PlanError
from plait.explain.term import read_term
from plait.models.experts import Experts, MixtureOfExperts
from plait.models.layers import CausalAttention
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES

MOST_STEPS = 64
LEARNING_RATE = 0.125
MOMENTUM = 0.5
STEPS_AT_FULL_RATE = 5
"""The longest round of ranks by themselves that keeps the learning rate."""
CAPACITY = 1.0
"""The tokens that an expert takes at most, in units of its equal share of a sequence."""


@dataclass(frozen=True)
class Case:
    """A model and a batch for one term.

    Attributes:
        plan: that runs; `word` is the strategy that it shows.
        make_model: the whole model, with its values.
        inputs, targets: of one step, of all ranks.
        roles: of the layers, where the term splits them.
        num_steps: after which everything has happened once.
        learning_rate: of each step.
        limits: of sizes, behind which the code takes the ways of large tensors.
        about: the case in a sentence.
    """

    plan: Plan
    word: str
    make_model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    about: str
    roles: Mapping[str, str] | None = None
    num_steps: int = 1
    learning_rate: float = LEARNING_RATE
    limits: Mapping[str, int] = field(default_factory=dict)


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Half the sum of the squares, and the number of rows, both 0-dim: the gradient is output [...,
    D] - target.
    """
    num_rows = output.numel() // output.shape[-1]
    return (output - target).square().sum() / 2, torch.tensor(float(num_rows))


def case_of(term: str) -> Case:
    """The case of a term. Errors: `PlanError`, `NotAvailable`."""
    plan, axis = read_term(term)
    made = {"pp": _pipeline, "tp": _tensor, "dp": _data, "ep": _experts, "cp": _attention}
    return made[axis](plan)


# -- the models


def weights(num_features: int, sign: int) -> Tensor:
    """A matrix [num_features, num_features]: ones on the diagonal, and `sign` right of it. A row
    adds, or subtracts, two numbers.
    """
    return torch.eye(num_features) + sign * torch.diag(torch.ones(num_features - 1), 1)


def linear(num_features: int, sign: int) -> nn.Linear:
    """A layer without bias of such weights."""
    layer = nn.Linear(num_features, num_features, bias=False)
    layer.weight.data.copy_(weights(num_features, sign))
    return layer


def layers(num_layers: int, num_features: int) -> nn.Sequential:
    """Linear layers W1, W2, ... without bias; of every two, one adds and one subtracts."""
    model = nn.Sequential()
    for index in range(num_layers):
        model.add_module(f"W{index + 1}", linear(num_features, 1 - 2 * (index % 2)))
    return model


def blocks(num_blocks: int, num_features: int) -> nn.Sequential:
    """Blocks of two layers each, W1, W2, ... throughout, as recomputation takes them."""
    model = nn.Sequential()
    for index in range(num_blocks):
        block = nn.Sequential()
        for place in (0, 1):
            name = f"W{2 * index + place + 1}"
            block.add_module(name, linear(num_features, 1 - 2 * place))
        model.add_module(f"B{index + 1}", block)
    return model


class SmallAttention(nn.Module):
    """Projections q, k, v, attention over the past, and a projection: [B, S, D] -> the same."""

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        size = num_heads * head_size
        self.q = linear(size, 1)
        self.k = linear(size, -1)
        self.v = linear(size, 1)
        self.o = linear(size, -1)
        self.core = CausalAttention()

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        heads = (self.num_heads, -1)
        q, k, v = (
            each(x).unflatten(-1, heads).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        output: Tensor = self.o(self.core(q, k, v).transpose(1, 2).flatten(2))
        return output


class Mixture(nn.Module):
    """One mixture of experts, of which each token takes one."""

    def __init__(self, num_experts: int, size: int) -> None:
        super().__init__()
        angles = torch.arange(num_experts) * (2 * torch.pi / num_experts)
        settings = RouterSettings(num_experts, 1, normalise=False, capacity_factor=CAPACITY)
        router = Router(size, settings)
        experts = Experts(num_experts, size, size, std=1.0, std_residual=1.0)
        self.moe = MixtureOfExperts(router, experts, None)
        chosen = torch.stack([angles.cos(), angles.sin()], dim=1).round(decimals=2)
        router.weight.data.copy_(chosen)
        for index in range(num_experts):
            experts.gate.data[index] = weights(size, 1)
            experts.up.data[index] = torch.eye(size) * (index + 1)
            experts.down.data[index] = torch.eye(size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        output: Tensor = self.moe(x)
        return output


def numbers(*shape: int) -> Tensor:
    """The numbers 0, 1, 2 along each row, each row a place further, in a tensor [*shape]."""
    index = torch.zeros(shape)
    for dim, size in enumerate(shape):
        steps = torch.arange(size, dtype=torch.float32)
        index = index + steps.view(-1, *[1] * (len(shape) - dim - 1))
    return index % 3


# -- the cases


def _data(plan: Plan) -> Case:
    dp = plan.dp
    steps = 1
    if not STRATEGIES[dp.strategy].synchronous:
        steps = dp.every or 2
    if steps > MOST_STEPS:
        raise PlanError(
            f"{dp} averages after {steps} steps, and explain shows rounds of at most {MOST_STEPS}; "
            f"take dp{dp.size}:local,every4: a longer round is the same, with more steps"
        )
    # The samples of later ranks are larger, and a rank that is alone for long leaves the minimum.
    slower = max(1, dp.size // 2) ** 2 if steps > STEPS_AT_FULL_RATE else 1
    features = max(2, dp.shard if dp.shard <= 8 else 2)
    rows = dp.size * plan.micro_batches
    again = plan.remat != "none"
    what = (
        "two blocks of two layers, Y = X W1^T W2^T W3^T W4^T"
        if again
        else "two layers, Y = X W1^T W2^T"
    )
    about = (
        f"{what}, weights [{features} x {features}]; {rows} sample{'s' * (rows > 1)} a step, "
        f"{plan.micro_batches} for each rank"
    )
    return Case(
        plan,
        dp.strategy if dp.size > 1 else _option(plan),
        lambda: blocks(2, features) if again else layers(2, features),
        numbers(rows, features),
        torch.ones(rows, features),
        about,
        num_steps=steps,
        learning_rate=LEARNING_RATE / slower,
    )


def _option(plan: Plan) -> str:
    """The word that a plan of one rank shows: one that splits nothing, or `one`."""
    if plan.remat != "none":
        return f"remat {plan.remat}"
    return "one" if plan.precision == "float32" else f"precision {plan.precision}"


def _tensor(plan: Plan) -> Case:
    tp = plan.tp
    sizes = {
        "1d": (2, max(2, tp.size)),
        "2d": (2 * tp.q, 2 * tp.q),
        "2.5d": (2 * tp.q * tp.depth, 2 * tp.q),
        "3d": (tp.q * tp.q, tp.q * tp.q),
    }
    rows, features = sizes[tp.mode]
    rows *= plan.micro_batches
    shape: tuple[int, ...] = (rows, features)
    if tp.sequence_parallel:
        shape = (plan.micro_batches, tp.size, features)

    def model() -> nn.Module:
        made = layers(2, features)
        made.add_module("W3", linear(features, 0))
        return made

    about = (
        f"a pair of layers, Y = X W1^T W2^T, and a layer W3 that every rank holds whole; weights "
        f"[{features} x {features}], X {_shape(shape)}"
    )
    return Case(
        plan,
        f"{tp.mode},sp" if tp.sequence_parallel else tp.mode,
        model,
        numbers(*shape),
        torch.ones(shape),
        about,
        roles={"W1": "column", "W2": "row", "W3": "replicated"},
        limits={"grid_panel_bytes": 0},
    )


def _pipeline(plan: Plan) -> Case:
    facts = SCHEDULES[plan.pp.schedule]
    stages = plan.pp.num_stages
    features = 2
    about = (
        f"{stages} layers, one a stage, weights [2 x 2]; {plan.micro_batches} micro-batches of one "
        "sample"
    )
    return Case(
        plan,
        plan.pp.schedule,
        lambda: layers(stages, features),
        numbers(plan.micro_batches, features),
        torch.ones(plan.micro_batches, features),
        about,
        num_steps=2 if facts.asynchronous else 1,
    )


def _experts(plan: Plan) -> Case:
    size = 2
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [2.0, 1.0]])
    rows = plan.dp.size * plan.micro_batches
    inputs = torch.stack([tokens.roll(row, 0)[:4] for row in range(rows)])
    capacity = math.ceil(CAPACITY * 4 / plan.ep)
    about = (
        f"{plan.ep} experts, each token takes one, and an expert at most {capacity} of a sample's "
        "tokens; a sample a rank, of 4 tokens of 2 numbers"
    )
    return Case(plan, "ep", lambda: Mixture(plan.ep, size), inputs, torch.ones(inputs.shape), about)


def _attention(plan: Plan) -> Case:
    cp = plan.cp
    heads = cp.size if cp.strategy == "ulysses" else 1
    length = 2 * cp.size
    shape = (plan.micro_batches, length, 2 * heads)
    about = (
        f"one attention of {heads} head{'s' * (heads > 1)} of 2 numbers; one sequence of {length} "
        "tokens"
    )
    return Case(
        plan,
        f"cp {cp.strategy}",
        lambda: SmallAttention(heads, 2),
        numbers(*shape),
        torch.ones(shape),
        about,
        roles={"core": "attention"},
    )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{' x '.join(map(str, shape))}]"
