"""Steps that a GPU decides on: no wait for it, the bits of steps that the host decides on."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from plait import comm
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.errors import NonFiniteLoss
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.plan import Plan
from tests.accelerator.on_device import is_there, sharing
from tests.parity.families import family_of
from tests.parity.test_graphs import adamw, batches

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
    pytest.mark.filterwarnings("default"),  # of a compiler of another version
]
STEPS = 6
ALONE = [
    *(("dp1", False), ("dp1 mb2", False), ("dp1 remat:full", False), ("dp1 precision:bf16", False)),
    *(("dp1 precision:bf16 mb2", False), ("dp1 precision:bf16 compile", False)),
    *(("dp1", True), ("dp1 precision:bf16", True)),
]
SHARED = [
    *("dp2", "dp2:zero1 mb2", "dp2:zero3 precision:bf16", "dp2:server"),
    *("tp2", "tp2:1d,sp dp2:zero3", "pp2:1f1b mb2", "pp2:zb-h1 dp2:zero1 mb2"),
]


def engine_of(world: World, plan: str, **options: Any) -> Engine:
    return build(
        family_of("split-gpt").model(),
        plan,
        loss=cross_entropy,
        optimizer=adamw,
        options=Options(clip_grad_norm=0.5, **options),
        world=world,
    )


@pytest.mark.parametrize(("plan", "records"), ALONE)
def test_the_host_waits_for_nothing(plan: str, records: bool) -> None:
    """Torch raises where the host waits for the device, but for an event: that of a step before."""
    world = comm.init(Mesh(), device="cuda:0")
    try:
        engine = engine_of(world, plan, cuda_graphs=records)
        given = list(batches("split-gpt"))
        for batch in given[:4]:  # graphs are recorded in the fourth
            engine.step(batch)
        there = tuple(one.to("cuda:0") for one in given[4])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [engine.step(batch) for batch in (there, *given[5:])]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(math.isfinite(one.loss) for one in results)
    finally:
        world.close()


def trained(world: World, plan: str, defers: bool) -> tuple[list[float], list[Tensor]]:
    engine = engine_of(world, plan, defer_reads=defers)
    axis = world.axis("dp")
    results = []
    for batch in family_of("split-gpt").batches(8)[:STEPS]:
        own = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch)
        results.append(engine.step(own))
    values = [shard.values.clone() for shard in engine.local_parameters()]
    return [number for one in results for number in (one.loss, one.grad_norm)], values


@pytest.mark.parametrize("plan", ["dp1", "dp1 precision:bf16", *SHARED])
def test_a_gpu_decides_as_the_host_does(plan: str) -> None:
    size = Plan.parse(plan).world_size
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            run = sharing("cuda:0")
            of_host = run(size, trained, plan, False, plan=plan)
            of_device = run(size, trained, plan, True, plan=plan)
    finally:
        torch.use_deterministic_algorithms(before)
    for (numbers, values), (wanted, expected) in zip(of_device, of_host, strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-6)
        for value, other in zip(values, expected, strict=True):
            assert torch.allclose(value, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("plan", ["dp1", "dp1 precision:bf16"])
@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_a_bad_step_changes_nothing(plan: str, answer: str) -> None:
    world = comm.init(Mesh(), device="cuda:0")
    try:
        engine = engine_of(world, plan, on_nan=answer)
        first, second, third, *_ = batches("split-gpt")
        engine.step(first)
        before = [shard.values.clone() for shard in engine.local_parameters()]
        norm = next(m for m in engine.model.modules() if isinstance(m, torch.nn.LayerNorm))
        handle = norm.register_forward_hook(lambda module, args, output: output * math.nan)
        result = engine.step(second)
        assert result.skipped and math.isnan(result.loss)
        handle.remove()
        if answer == "stop":
            with pytest.raises(NonFiniteLoss, match=r"step 2: .*passing"):
                engine.step(third)
        else:
            engine.settle()
        after = [shard.values for shard in engine.local_parameters()]
        assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    finally:
        world.close()
