"""Batches and losses for the modules of `kinds_of_modules`, and a loop that trains one plainly."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import plait
from plait.comm import World
from plait.engine.seeds import derive_seed
from plait.plan import Plan
from plait.verify.record.compare import largest, relative_error
from tests.parity import kinds_of_modules as kinds
from tests.parity import regions_and_orders
from tests.parity.harness import join
from tests.parity.kinds_of_modules import LENGTH, VOCABULARY

SAMPLES, STEPS, SEED, RATE = 8, 2, 5, 0.1

Loss = Callable[[Any, Any], Any]
_DRAWING = threading.Lock()
_MODELS: dict[str, nn.Module] = {}


@dataclass(frozen=True)
class Case:
    """How one module is trained. `by_slice`: each micro-batch is a thing of its own.

    Statistics, draws and buffers belong to a micro-batch of a rank by definition.
    """

    batch: Callable[[torch.Generator], tuple[Any, Any]]
    loss: Loss
    by_slice: bool = False


def tokens(generator: torch.Generator, high: int = VOCABULARY, length: int = LENGTH) -> Tensor:
    return torch.randint(0, high, (SAMPLES, length), generator=generator)


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(SAMPLES, *(shape or (12,)), generator=generator, dtype=torch.float64)


def _lines(generator: torch.Generator) -> tuple[Any, Any]:
    ids = tokens(generator, length=LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


def _points(generator: torch.Generator) -> tuple[Any, Any]:
    return numbers(generator), numbers(generator)


def _pictures(generator: torch.Generator) -> tuple[Any, Any]:
    return numbers(generator, 3, 8, 8), numbers(generator, 3, 8, 8)


def _labelled(generator: torch.Generator) -> tuple[Any, Any]:
    return numbers(generator, 3, 8, 8), torch.randint(0, 10, (SAMPLES,), generator=generator)


def _pairs(generator: torch.Generator) -> tuple[Any, Any]:
    alike = torch.randint(0, 2, (SAMPLES,), generator=generator)
    return (numbers(generator), numbers(generator)), alike


def _sentences(generator: torch.Generator) -> tuple[Any, Any]:
    source, said = tokens(generator), tokens(generator, length=LENGTH + 1)
    return {"source": source, "target": said[:, :-1]}, said[:, 1:]


def _graphs(generator: torch.Generator) -> tuple[Any, Any]:
    edges = torch.randint(0, 5, (SAMPLES, 7, 2), generator=generator)
    return {"nodes": numbers(generator, 5, 6), "edges": edges}, numbers(generator, 3)


def _nested(generator: torch.Generator) -> tuple[Any, Any]:
    one, two, three = (numbers(generator) for _ in range(3))
    return ([one, [two, three]],), numbers(generator)


def _clicks(generator: torch.Generator) -> tuple[Any, Any]:
    items, users = tokens(generator, 30, 5), tokens(generator, 10, 1)[:, 0]
    dense = numbers(generator, 4)
    return {"items": items, "user": users, "dense": dense}, numbers(generator, 1)[:, 0]


def _scaled(generator: torch.Generator) -> tuple[Any, Any]:
    return {"x": numbers(generator), "scale": numbers(generator, 1)[:, 0]}, numbers(generator)


def _signed(generator: torch.Generator) -> tuple[Any, Any]:
    inputs, targets = _points(generator)
    return inputs.abs() * torch.tensor([1.0] * 4 + [-1.0] * 4)[:, None], targets


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def summed_token_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def distance(output: Any, targets: Tensor) -> Tensor:
    if isinstance(output, kinds.Answer):
        output = output.logits
    if isinstance(output, dict):
        output = output["logits"]
    return F.mse_loss(output, targets)


def contrast(output: tuple[Tensor, Tensor], alike: Tensor) -> Tensor:
    gap = (output[0] - output[1]).norm(dim=-1)
    return torch.where(alike == 1, gap.square(), (1 - gap).clamp(min=0).square()).mean()


def evidence(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    made, mean, spread = output
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1)
    return F.mse_loss(made, targets) + 0.1 * divergence.mean()


def nested_distance(output: list[Any], targets: Tensor) -> Tensor:
    return F.mse_loss(output[0] + output[1][0], targets)


CASES: dict[str, Case] = {
    "UNet": Case(_pictures, distance),
    "Translator": Case(_sentences, token_loss),
    "Images": Case(_labelled, F.cross_entropy, by_slice=True),
    "Graph": Case(_graphs, distance),
    "TopOne": Case(_lines, token_loss),
    "TiedHead": Case(_lines, summed_token_loss),
    "Spectral": Case(_points, distance),
    "Moving": Case(_points, distance, by_slice=True),
    "Lists": Case(_points, distance),
    "Wave": Case(_lines, token_loss),
    "Siamese": Case(_pairs, contrast),
    "Variational": Case(_points, evidence, by_slice=True),
    "Cell": Case(_lines, token_loss),
    "LinearAttention": Case(_lines, token_loss),
    "Hyper": Case(_points, distance),
    "Checkpointed": Case(_lines, token_loss),
    "CheckpointedAnew": Case(_lines, token_loss),
    "Recomputed": Case(_lines, token_loss),
    "RecomputedAnew": Case(_lines, token_loss),
    "Nested": Case(_nested, nested_distance),
    "Bags": Case(_clicks, distance),
    "OwnBackward": Case(_points, distance),
    "Reversible": Case(_points, distance),
    "Cycles": Case(_points, distance),
    "Dataclass": Case(_points, distance),
    "WithNone": Case(_scaled, distance),
    "Shuffled": Case(_points, distance, by_slice=True),
    "Swapped": Case(_signed, distance, by_slice=True),
}


def _class(kind: str) -> type[nn.Module]:
    found: type[nn.Module] = getattr(kinds, kind, None) or getattr(regions_and_orders, kind)
    return found


def model_of(kind: str) -> nn.Module:
    """The module with its own values, in float64 on the host.

    Ranks that are threads share one generator, so the values are drawn by one of them.
    """
    with _DRAWING:
        if kind not in _MODELS:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                _MODELS[kind] = doubled(_class(kind)())
        return copy.deepcopy(_MODELS[kind])


def doubled(model: nn.Module) -> nn.Module:
    """In double precision, complex numbers too."""
    model = model.double()
    for owner in model.modules():
        for name, param in owner._parameters.items():
            if param is not None and param.is_complex():
                owner._parameters[name] = nn.Parameter(param.detach().to(torch.complex128))
    return model


def batches(kind: str) -> Iterator[tuple[Any, Any]]:
    """The global batches of all steps."""
    for step in range(STEPS):
        yield CASES[kind].batch(torch.Generator().manual_seed(100 + step))


def part(batch: Any, index: int, size: int) -> Any:
    """One of so many equal parts of the samples."""
    return tree_map(lambda leaf: leaf.tensor_split(size)[index], batch)


def called(model: nn.Module, inputs: Any) -> Any:
    """The output of the module."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def plainly(kind: str, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last parameters of a loop over whole batches on one device."""
    case, model = CASES[kind], model_of(kind)
    size, count = (plan.dp.size, plan.micro_batches) if case.by_slice else (1, 1)
    kept = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(size)]
    losses = []
    for step, batch in enumerate(batches(kind)):
        total = 0.0
        for rank in range(size):
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[rank][name])
            for micro in range(count):
                piece = part(part(batch, rank, size), micro, count)
                seed = derive_seed(SEED, "step", step, rank * count + micro)
                torch.manual_seed(seed)
                random.seed(seed)
                loss = case.loss(called(model, piece[0]), piece[1])
                loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
                share = len(tree_leaves(piece)[0]) / SAMPLES
                (loss * share).backward()
                total += float(loss.detach()) * share
            kept[rank] = {name: b.clone() for name, b in model.named_buffers()}
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(RATE * param.grad)
                    param.grad = None
        losses.append(total)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(world: World, kind: str, plan_text: str) -> tuple[list[float], list[Any]]:
    """Losses of all steps and the parts of the last parameters that a rank has."""
    engine = plait.build(
        model_of(kind),
        plan_text,
        loss=CASES[kind].loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=RATE, foreach=False),
        options=plait.Options(seed=SEED),
        world=world,
    )
    axis = world.axis("dp")
    losses = [engine.step(part(batch, axis.rank, axis.size)).loss for batch in batches(kind)]
    shards = engine.local_parameters()
    return losses, [
        (shard.name, shard.global_shape, shard.index(), shard.values.clone()) for shard in shards
    ]


def distance_apart(kind: str, plan: Plan, by_rank: list[Any]) -> float:
    """How far losses and parameters of the ranks lie from the plain loop's, relatively."""
    losses, params = plainly(kind, plan)
    found = join([parts for _, parts in by_rank])
    assert found.keys() == params.keys()
    worst = 0.0
    for rank, _ in by_rank:
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(rank, losses, strict=True)))
    scale = largest(params)
    for name, value in params.items():
        worst = max(worst, relative_error(found[name].view_as(value), value, scale))
    return worst
