"""Ranks that do not step together, replayed on one device: plain PyTorch, no engine, no
communication.

`local_rounds` is what N ranks of local SGD do; `replay` makes the updates of an asynchronous server
again, in the order that was recorded, from gradients computed at the versions that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.state.init import Initializer, place_holders
from plait.models import losses
from plait.outer.async_server.staleness import Applied
from tests.parity.families import Family
from tests.parity.harness import SEED

Values = dict[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def fresh(family: Family) -> nn.Module:
    """The family's model with the engine's initial values, float64."""
    model = family.model()
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    return model


def values(model: nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def load(model: nn.Module, new: Values) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(new[name])


def mean_gradient(
    model: nn.Module, batch: tuple[Tensor, Tensor], clip: float | None = None
) -> float:
    """Leave the gradient of the mean loss in the parameters; the number of tokens."""
    model.zero_grad()
    total, count = losses.cross_entropy(model(batch[0]), batch[1])
    if float(count):
        (total / count).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return float(count)


def sum_gradient(
    model: nn.Module, batch: tuple[Tensor, Tensor], clip: float | None = None
) -> float:
    """Leave the gradient of the summed loss in the parameters, that of the mean clipped before; the
    number of tokens.
    """
    if clip is not None:
        count = mean_gradient(model, batch, clip)
        for param in model.parameters():
            param.grad = None if param.grad is None else param.grad * count
        return count
    model.zero_grad()
    total, count = losses.cross_entropy(model(batch[0]), batch[1])
    total.backward()
    return float(count)


@dataclass(frozen=True)
class Outer:
    """The outer step of local SGD."""

    every: int
    lr: float = 1.0
    momentum: float = 0.0


def local_rounds(
    family: Family,
    shares: Sequence[Any],
    outer: Outer,
    make: MakeOptimizer,
    *,
    away: Mapping[int, tuple[int, int]] | None = None,
    num_steps: int | None = None,
) -> list[Values]:
    """`shares[rank][step]`; the anchor after every round, a last short one included.

    `away`: the rounds (from, up to) that a rank is missing from, by rank; it comes back with the
    anchor and a new optimizer.
    """
    models = [fresh(family) for _ in shares]
    optimizers = [make(model.parameters()) for model in models]
    anchor = values(models[0])
    anchors = []
    momentum = {name: torch.zeros_like(value) for name, value in anchor.items()}
    tokens = [0.0] * len(models)
    num_steps = len(shares[0]) if num_steps is None else num_steps
    for step in range(num_steps):
        for rank, model in enumerate(models):
            first, back = (away or {}).get(rank, (num_steps, num_steps))
            if first <= step // outer.every < back:
                optimizers[rank] = make(model.parameters())
                continue
            count = mean_gradient(model, shares[rank][step])
            tokens[rank] += count
            if count:
                optimizers[rank].step()
        if (step + 1) % outer.every == 0 or step + 1 == num_steps:
            now = [values(model) for model in models]
            for name in anchor:
                difference = sum(
                    t * (anchor[name] - v[name]) for t, v in zip(tokens, now, strict=True)
                ) / sum(tokens)
                momentum[name] = outer.momentum * momentum[name] + difference
                anchor[name] = anchor[name] - outer.lr * (
                    difference + outer.momentum * momentum[name]
                )
            for model in models:
                load(model, anchor)
            tokens = [0.0] * len(models)
            anchors.append({name: value.clone() for name, value in anchor.items()})
    return anchors


@dataclass(frozen=True)
class Recorded:
    """What one server did: its keys, and its updates in order. It adds the gradients of its own
    worker, `own`, first.
    """

    keys: tuple[str, ...]
    log: tuple[Applied, ...]
    own: int = 0

    def steps(self, applied: Applied) -> list[tuple[int, int]]:
        """(worker, step) of the gradients in an update, in the order in which they were added."""
        ordered = sorted(applied.pushes, key=lambda push: (push.worker != self.own, push.worker))
        return [(push.worker, push.step) for push in ordered]


@dataclass
class _Server:
    recorded: Recorded
    optimizer: torch.optim.Optimizer
    params: dict[str, nn.Parameter]
    versions: list[Values]


def replay(
    family: Family,
    shares: Sequence[Sequence[tuple[Tensor, Tensor]]],
    servers: Sequence[Recorded],
    make: MakeOptimizer,
    clip: float | None = None,
) -> Values:
    """The weights after all recorded updates. `shares[worker][step]` are the batches."""
    model = fresh(family)
    lr = make([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    live = [_server(model, recorded, make) for recorded in servers]
    bases: dict[tuple[int, int], dict[int, int]] = {}
    for index, recorded in enumerate(servers):
        for push in (push for applied in recorded.log for push in applied.pushes):
            bases.setdefault((push.worker, push.step), {})[index] = push.base
    gradients: dict[tuple[int, int], tuple[float, Values]] = {}
    done = [0] * len(live)
    while any(d < len(s.recorded.log) for d, s in zip(done, live, strict=True)):
        before = list(done)
        for index, server in enumerate(live):
            while done[index] < len(server.recorded.log):
                steps = server.recorded.steps(server.recorded.log[done[index]])
                if not all(_known(step, bases, live) for step in steps):
                    break
                for step in steps:
                    if step not in gradients:
                        load(
                            model,
                            {
                                k: v
                                for s, b in bases[step].items()
                                for k, v in live[s].versions[b].items()
                            },
                        )
                        count = sum_gradient(model, shares[step[0]][step[1]], clip)
                        gradients[step] = (
                            count,
                            {n: p.grad.clone() for n, p in model.named_parameters()},
                        )  # type: ignore[union-attr]
                _apply(server, [gradients[step] for step in steps], lr * (len(steps) / len(shares)))
                done[index] += 1
        assert done != before, (
            "the record has no beginning: an update needs weights that come after it"
        )
    return {name: value for server in live for name, value in server.versions[-1].items()}


def _server(model: nn.Module, recorded: Recorded, make: MakeOptimizer) -> _Server:
    start = values(model)
    params = {key: nn.Parameter(start[key].clone()) for key in recorded.keys}
    return _Server(
        recorded, make(list(params.values())), params, [{key: start[key] for key in recorded.keys}]
    )


def _known(
    step: tuple[int, int], bases: dict[tuple[int, int], dict[int, int]], live: list[_Server]
) -> bool:
    return all(base < len(live[server].versions) for server, base in bases[step].items())


def _apply(server: _Server, pushed: list[tuple[float, Values]], lr: float) -> None:
    total = sum(count for count, _ in pushed)
    for name, param in server.params.items():
        param.grad = sum((grads[name] for _, grads in pushed), torch.zeros_like(param)) * (
            1.0 / total
        )
    for group in server.optimizer.param_groups:
        group["lr"] = lr
    server.optimizer.step()
    server.versions.append({name: param.detach().clone() for name, param in server.params.items()})
