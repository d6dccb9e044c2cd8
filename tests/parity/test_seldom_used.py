"""Parameters that no sample used, and counts of small weights, under plans whose ranks exchange
what they do by themselves. Each is compared with a loop of plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm import World
from plait.engine.engine import Engine
from plait.errors import NotAvailable
from plait.outer import Asynchrony
from tests.helpers.threaded import threaded

STEPS = 4
Batch = tuple[Tensor, Tensor]


class Branched(nn.Module):
    """A branch for some samples alone, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.branch = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if bool((x[:, 0] > 1).any()):
            hidden = hidden + self.branch(hidden)
        out: Tensor = self.last(hidden)
        return out


def model() -> nn.Module:
    made = Branched().double()
    with torch.no_grad():
        for index, param in enumerate(made.parameters()):
            param.copy_(torch.linspace(-1, 1 + index, param.numel()).view_as(param))
    return made


def batches() -> list[Batch]:
    """The branch is used by the first sample of the odd steps."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for step in range(STEPS):
        inputs = torch.rand(6, 3, generator=generator, dtype=torch.float64)
        inputs[0, 0] += 2 * (step % 2)
        made.append((inputs, torch.randint(0, 3, (6,), generator=generator)))
    return made


def part(batch: Batch, rank: int, size: int) -> Batch:
    inputs, targets = (tensor.tensor_split(size)[rank] for tensor in batch)
    return inputs, targets


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def weighed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over weights whose sum is far below 1."""
    weights = torch.where(targets == 0, 0.01, 0.03).double()
    return (F.cross_entropy(output, targets, reduction="none") * weights).sum(), weights.sum()


def trained(engine: Engine) -> dict[str, Tensor]:
    return {
        part.name: part.values.detach().clone().view(part.global_shape)
        for part in engine.local_parameters()
        if part.values.numel() == torch.Size(part.global_shape).numel()
    }


def on_ranks(
    plan: str,
    body: Callable[[Engine, World], None],
    **options: Any,
) -> dict[str, Tensor]:
    """The parameters after `body` on every rank of a plan."""
    size = plait.Plan.parse(plan).world_size
    models = [model() for _ in range(size)]

    def run(world: World) -> dict[str, Tensor]:
        engine = plait.build(
            models[world.rank],
            f"{plan} precision:float64",
            loss=weighed,
            optimizer=adamw,
            options=plait.Options(**options),
            world=world,
        )
        body(engine, world)
        engine.driver.close()
        return trained(engine)

    found = threaded(size, run, plan=plan)
    return {name: value for one in found for name, value in one.items()}


def check(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-12, msg=name)


def in_turns(engine: Engine, world: World) -> None:
    """Worker after worker, so that the order of the updates is known."""
    axis = world.axis("dp")
    for batch in batches():
        for rank in range(axis.size):
            axis.barrier()
            if rank == axis.rank:
                engine.step(part(batch, rank, axis.size))
    engine.driver.synchronize()
    engine.strategy.publish()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_asynchronous_server_leaves_what_no_worker_used_as_it_is(num_servers: int) -> None:
    """Neither weight decay nor moments of older gradients move it, as on one device."""
    server = model()
    held = [copy.deepcopy(server) for _ in range(2)]
    optimizer = adamw(server.parameters())
    optimizer.param_groups[0]["lr"] /= 2
    for batch in batches():
        for rank, worker in enumerate(held):
            worker.zero_grad()
            inputs, targets = part(batch, rank, 2)
            total, count = weighed(worker(inputs), targets)
            (total / count).backward()  # type: ignore[no-untyped-call]
            for own, theirs in zip(server.parameters(), worker.parameters(), strict=True):
                own.grad = None if theirs.grad is None else theirs.grad.clone()
            optimizer.step()
            worker.load_state_dict(server.state_dict())
    check(on_ranks("dp2:async-server,stale8", in_turns, num_servers=num_servers), server)


def every_batch(engine: Engine, world: World) -> None:
    axis = world.axis("dp")
    for batch in batches():
        engine.step(part(batch, axis.rank, axis.size))
    engine.driver.synchronize()


def test_ranks_of_local_sgd_weigh_by_counts_below_one() -> None:
    anchor = model()
    workers = [copy.deepcopy(anchor) for _ in range(2)]
    optimizers = [adamw(worker.parameters()) for worker in workers]
    weights = [0.0, 0.0]
    for step, batch in enumerate(batches()):
        for rank, worker in enumerate(workers):
            worker.zero_grad()
            inputs, targets = part(batch, rank, 2)
            total, count = weighed(worker(inputs), targets)
            (total / count).backward()  # type: ignore[no-untyped-call]
            optimizers[rank].step()
            weights[rank] += float(count)
        if step % 2 == 0:
            continue
        with torch.no_grad():
            for own, *theirs in zip(*(m.parameters() for m in (anchor, *workers)), strict=True):
                moved = sum(w * (own - p) for w, p in zip(weights, theirs, strict=True))
                own.sub_(0.7 * moved / sum(weights))
        for worker in workers:
            worker.load_state_dict(anchor.state_dict())
        weights = [0.0, 0.0]
    outer = Asynchrony(outer_lr=0.7)
    check(on_ranks("dp2:local,every2", every_batch, asynchrony=outer), anchor)


def mean_of_means() -> nn.Module:
    """One device with the mean of the means of two workers."""
    expected = model()
    optimizer = adamw(expected.parameters())
    for batch in batches():
        optimizer.zero_grad()
        for rank in range(2):
            inputs, targets = part(batch, rank, 2)
            total, count = weighed(expected(inputs), targets)
            (total / count / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return expected


@pytest.mark.parametrize("plan", ["dp2:server", "dp2", "dp2:zero2", "dp2:zero1"])
def test_the_mean_of_workers_with_counts_below_one(plan: str) -> None:
    found = on_ranks(plan, every_batch, aggregate="mean")
    expected = mean_of_means()
    for name, value in expected.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("dp2 pp2:gpipe mb2", "leave pp out"),
        ("pp2:2bw mb2", "leave pp out"),
        ("dp2 cp2", "leave cp and ep out"),
        ("dp2 tp4:2d", "take tp4"),
        ("dp2:zero2 mb2", "take dp2:zero1"),
        ("dp2:zero3 mb2", "take dp2:zero1"),
        ("dp2:local,every2", "take dp2:server"),
        ("dp2:async-server,stale1", "take dp2:server"),
    ],
)
def test_the_mean_of_workers_is_refused_where_no_rank_knows_its_workers_count(
    plan: str, said: str
) -> None:
    with pytest.raises(NotAvailable, match=said):
        plait.build(
            model(), plan, loss=weighed, optimizer=adamw, options=plait.Options(aggregate="mean")
        )
