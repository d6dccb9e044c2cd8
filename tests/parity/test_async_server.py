"""The asynchronous server on real ranks: its recorded order, replayed on one device, gives the same
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.engine.build import Options, build
from plait.models import losses
from plait.outer import Asynchrony, AsyncServerDriver, KeyedWeights
from plait.verify.record.compare import largest, relative_error
from tests.parity.families import FAMILIES, Family
from tests.parity.harness import SEED, TOLERANCE, join
from tests.parity.replay import Recorded, replay

Run = Callable[..., list[Any]]
STEPS = 6


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-6)


def shares(family: Family, size: int, num_samples: int = 8) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(11)
    batches = [family._batch(num_samples, generator) for _ in range(STEPS)]
    return [
        [(x.tensor_split(size)[r], y.tensor_split(size)[r]) for x, y in batches]
        for r in range(size)
    ]


def train(
    world: World,
    plan: str,
    family_name: str,
    optimizer: Any,
    options: dict[str, Any],
    slow: float = 0.0,
) -> Any:
    """What the rank holds in the end, the record of its server, what each step told, and the bytes
    that its server sent after its last step; rank 0 is slower by `slow` s.
    """
    family = FAMILIES[family_name]
    axis = world.axis("dp")
    engine = build(
        family.model(),
        plan,
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, **options),
        world=world,
    )
    driver = engine.driver
    server = driver.server if isinstance(driver, AsyncServerDriver) else None
    if server is not None:
        server.log = []
    axis.barrier()  # nothing is pushed before everybody records
    engine.before_update.append(lambda e: time.sleep(slow if axis.rank == 0 else 0.0))
    results = [engine.step(batch, trace=False) for batch in shares(family, axis.size)[axis.rank]]
    driver.synchronize()
    # Every worker has left: one thread answers each, and has counted all before it let it go.
    late = _bytes_sent_late(driver)
    parts = [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]
    record = None
    if server is not None:
        record = Recorded(
            tuple(dict.fromkeys(p.name for p in engine.strategy.pieces)),
            tuple(server.log or ()),
            axis.rank,
        )
    told = [(r.loss, r.tokens, r.details, r.ledger.by_axis()) for r in results]
    return parts, record, told, late


def _bytes_sent_late(driver: Any) -> int:
    """The bytes of answers that no step has counted."""
    service = driver._service if isinstance(driver, AsyncServerDriver) else None
    return 0 if service is None else service.take_sent_bytes()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("stale", [1, 4, 16])
@pytest.mark.parametrize(
    ("family", "size", "num_servers"), [("gpt", 2, 2), ("mlp", 4, 2), ("mlp", 3, 1)]
)
def test_a_replay_of_the_record_is_exact(
    ranks: Run, family: str, size: int, num_servers: int, stale: int, optimizer: Any
) -> None:
    plan = f"dp{size}:async-server,stale{stale} precision:float64"
    results = ranks(
        size, train, plan, family, optimizer, {"num_servers": num_servers}, 0.003, plan=plan
    )
    records = [record for _, record, *_ in results if record is not None]
    assert len(records) == num_servers
    expected = replay(FAMILIES[family], shares(FAMILIES[family], size), records, optimizer)
    params = join([parts for parts, *_ in results])
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(params[name].view_as(value), value, largest(expected)) <= TOLERANCE, (
            name
        )
    for record in records:
        assert sum(len(applied.pushes) for applied in record.log) == size * STEPS
        assert max(age for applied in record.log for age in applied.staleness) <= stale


def test_each_worker_clips_by_its_own_norm(ranks: Run) -> None:
    plan = "dp2:async-server,stale2 precision:float64"
    results = ranks(2, train, plan, "gpt", sgd, {"clip_grad_norm": 0.05}, plan=plan)
    expected = replay(
        FAMILIES["gpt"], shares(FAMILIES["gpt"], 2), [r for _, r, *_ in results], sgd, clip=0.05
    )
    params = join([parts for parts, *_ in results])
    for name, value in expected.items():
        assert relative_error(params[name].view_as(value), value, largest(expected)) <= TOLERANCE, (
            name
        )


def train_bound_zero(world: World, *args: Any) -> Any:
    from plait.parallel import data

    table = data.STRATEGIES
    before = table["server"]
    table["server"] = KeyedWeights  # with K = 0, which a plan gives to the synchronous one
    try:
        return train(world, *args)
    finally:
        table["server"] = before


@pytest.mark.parametrize("runner", [train, train_bound_zero], ids=["plan", "asynchronous code"])
@pytest.mark.parametrize(("size", "optimizer"), [(2, adamw), (4, sgd)])
def test_no_staleness_is_the_synchronous_server_to_the_last_bit(
    ranks: Run, size: int, optimizer: Any, runner: Any
) -> None:
    zero = ranks(
        size, runner, f"dp{size}:async-server,stale0", "gpt", optimizer, {}, plan=f"dp{size}"
    )
    together = ranks(size, train, f"dp{size}:server", "gpt", optimizer, {}, plan=f"dp{size}")
    one, other = (join([parts for parts, *_ in results]) for results in (zero, together))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_rank_sends_what_a_rank_of_the_synchronous_server_sends(
    ranks: Run, seconds: float
) -> None:
    """The same bytes, whoever is faster: what a server answers after its own last step counts."""
    counts = []
    for plan in ("dp2:async-server,stale16 precision:float64", "dp2:server precision:float64"):
        results = ranks(2, train, plan, "mlp", sgd, {}, seconds, plan=plan)
        in_steps = sum(step[3].get("dp", 0) for _, _, steps, _ in results for step in steps)
        counts.append(in_steps + sum(late for *_, late in results))
    assert counts[0] == counts[1] > 0


def test_what_steps_tell_covers_all_workers(ranks: Run) -> None:
    results = ranks(
        2, train, "dp2:async-server,stale4 precision:float64", "gpt", sgd, {"num_servers": 1}
    )
    family = shares(FAMILIES["gpt"], 2)
    everything = sum(int((y != -100).sum()) for rank in family for _, y in rank)
    told = [sum(tokens for _, tokens, *_ in steps) for _, _, steps, _ in results]
    assert max(told) == everything
    assert all(step[2]["staleness"] >= 0 for _, _, steps, _ in results for step in steps)


def test_a_slow_worker_does_not_hold_up_others_within_the_bound(ranks: Run) -> None:
    """The fast worker makes all its steps on one version of the slow worker's; then it rests and
    nobody waits for it.
    """
    plan = f"dp2:async-server,stale{STEPS} precision:float64"
    results = ranks(
        2,
        train,
        plan,
        "mlp",
        sgd,
        {"num_servers": 1, "asynchrony": Asynchrony(staleness_rate="inverse")},
        0.05,
        plan=plan,
    )
    (record,) = [record for _, record, *_ in results if record is not None]
    assert max(age for applied in record.log for age in applied.staleness) >= 2
    assert all(len(applied.pushes) == 1 for applied in record.log)
