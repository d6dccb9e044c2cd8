"""Steps that the device decides on: the bits of steps that the host decides on, heard later."""

from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.datasets.loader import Loader
from plait.engine import one_pass
from plait.engine.adamw import plain_kernel
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.step import StepResult
from plait.errors import DataError, ModelError, NonFiniteLoss
from plait.models.losses import cross_entropy
from plait.models.parameters import Parameters
from plait.plan import Plan
from plait.run.checkpoints import Checkpoints
from plait.run.hooks import Hook, StepDone
from plait.run.loop import fit
from plait.run.rollback import Rollback
from plait.run.rundir import RunFolder
from tests.helpers.threaded import threaded
from tests.parity.families import family_of

STEPS = 5
CELLS = [
    *(("dp1 mb2", "gpt"), ("dp2", "gpt"), ("dp2:zero1 mb2", "gpt"), ("dp2:zero2", "gpt")),
    *(("dp2:zero3 remat:full", "gpt"), ("dp2:ring", "gpt"), ("dp2:server", "gpt")),
    *(("dp4:zero3,replicate2", "gpt"), ("dp2 precision:bf16", "gpt"), ("dp2", "resnet")),
    *(("tp2:1d,sp dp2:zero3", "split-gpt"), ("tp4:2d", "split-gpt"), ("cp2:ring", "long-gpt")),
    *(("dp2 ep2", "mixtral-balanced"), ("dp2:zero1 mb2", "mixtral-balanced")),
    *(("pp2:1f1b mb2", "gpt"), ("pp2:zb-h1 dp2:zero1 mb2", "gpt"), ("pp2:zbv mb4", "gpt-deep")),
]
SAMPLES = [(torch.randn(4), torch.randn(4)) for _ in range(20)]
NET = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def adamw(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def trained(world: World, plan: str, name: str, later: bool) -> tuple[list[Any], list[Tensor]]:
    """Losses, norms, counts and loads of all steps, then the parameters."""
    family = family_of(name)
    engine = build(
        family.model(),
        plan,
        loss=cross_entropy,
        optimizer=adamw,
        world=world,
        options=Options(
            clip_grad_norm=0.5 if "mb" in plan else 100.0,
            learning_rate=lambda step: (step + 1) / STEPS,
            defer_reads=later,
        ),
    )
    axis = world.axis("dp")
    results = []
    for batch in family.batches(8)[:STEPS]:
        own = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch)
        results.append(engine.step(own, trace=False))
        load = results[-1].load  # a look before the host hears is the same
        assert results[-1].outcome.is_told is not later
    values = [shard.values.clone() for shard in engine.local_parameters()]
    assert results[-1].outcome.is_told
    assert results[-1].load == load
    numbers = [(one.loss, one.grad_norm, one.count, one.load) for one in results]
    return numbers, values


@pytest.mark.parametrize(("plan", "family"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_a_device_decides_as_the_host_does(plan: str, family: str) -> None:
    size = Plan.parse(plan).world_size
    of_host = threaded(size, trained, plan, family, False, plan=plan)
    of_device = threaded(size, trained, plan, family, True, plan=plan)
    for (numbers, values), (wanted, expected) in zip(of_device, of_host, strict=True):
        assert numbers == wanted
        assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))


# -- steps that do not count
# ------------------------------------------------------------------------------------------


def engine_of(world: World, loss: Any = None, plan: str = "dp2", **options: Any) -> Engine:
    return build(
        copy.deepcopy(NET),
        plan,
        loss=loss or (lambda output, target: (output - target).square().mean()),
        optimizer=adamw,
        world=world,
        options=Options(defer_reads=True, **options),
    )


def batch_of(world: World, index: int, *, bad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + world.rank)
    inputs = torch.randn(3, 4, generator=generator)
    if bad and world.rank == world.size - 1:
        inputs[1, 2] = math.inf
    return inputs, torch.randn(3, 4, generator=generator)


def values_of(engine: Engine) -> list[Tensor]:
    """Parameters, and what batch norm keeps."""
    return [one.detach().clone() for one in engine.model.state_dict().values()]


def after_a_bad_step(world: World) -> tuple[list[Tensor], list[Tensor], int, StepResult]:
    engine = engine_of(world)
    engine.step(batch_of(world, 0))
    engine.settle()
    before = [one.detach().clone() for one in engine.model.parameters()]
    result = engine.step(batch_of(world, 1, bad=True))
    if world.rank == 0:  # a look of one rank asks no other
        assert math.isnan(result.grad_norm)
        assert result.skipped
    with pytest.raises(NonFiniteLoss, match=r"step 2: .* the parameters are still those of step 1"):
        engine.step(batch_of(world, 2))
    return before, list(engine.model.parameters()), engine.step_index, result


def test_the_next_step_raises_and_nothing_has_changed() -> None:
    for before, after, steps, _ in threaded(2, after_a_bad_step):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert steps == 1


def skipping(world: World, plan: str, later: bool) -> tuple[list[Any], list[Tensor]]:
    engine = engine_of(world, plan=plan, on_nan="skip")
    if not later:
        engine.before_update.append(lambda one: None)  # somebody looks: the host decides
    results = [engine.step(batch_of(world, index, bad=index == 2)) for index in range(5)]
    engine.settle()
    told = [(one.skipped, None if one.skipped else one.loss) for one in results]
    return told, values_of(engine)


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp1 precision:bf16"])
def test_a_dropped_step_leaves_the_next_as_it_is(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind the bad one is made again, from the parameters that it should have.

    In bf16 the update is one pass, as on a GPU.
    """
    monkeypatch.setattr(one_pass, "is_at_hand", lambda device, make_optimizer: True)
    monkeypatch.setattr(one_pass, "kernel_of_gpus", lambda: plain_kernel)
    size = Plan.parse(plan).world_size
    of_device, of_host = (
        threaded(size, skipping, plan, later, plan=plan) for later in (True, False)
    )
    for (told, values), (wanted, expected) in zip(of_device, of_host, strict=True):
        assert [skipped for skipped, _ in told] == [False, False, True, False, False]
        assert told == wanted
        assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = target > 0
    return ((output - target).square() * counted).sum(), counted.sum()


def counting_nothing(world: World) -> None:
    engine = engine_of(world, masked)
    inputs, targets = batch_of(world, 0)
    engine.step((inputs, targets.abs() + 1))
    engine.step((inputs, -targets.abs() - 1))
    with pytest.raises(DataError, match="step 2: every target of the batch is masked"):
        engine.settle()


def test_a_batch_without_targets_is_named() -> None:
    threaded(2, counting_nothing)


def without_a_gradient(world: World) -> None:
    engine = engine_of(world, lambda output, target: (output - target).square().mean().detach())
    with pytest.raises((ModelError, RuntimeError)):
        engine.step(batch_of(world, 0))
        engine.settle()


def test_a_loss_without_a_gradient_is_named() -> None:
    threaded(2, without_a_gradient)


def evaluating_after_a_bad_step(world: World) -> list[bool]:
    engine = engine_of(world, on_nan="skip")
    results = [engine.step(batch_of(world, index, bad=index == 1)) for index in range(2)]
    assert math.isfinite(engine.evaluate(batch_of(world, 5)))
    with torch.no_grad():
        engine.local_parameters()
    return [one.skipped for one in results]


def test_an_evaluation_makes_a_bad_step_again_with_gradients() -> None:
    assert threaded(2, evaluating_after_a_bad_step) == [[False, True], [False, True]]


def results_kept(world: World) -> int:
    engine = engine_of(world)
    batches = [batch_of(world, index) for index in range(4)]
    alive = [weakref.ref(one) for one, _ in batches]
    results = [engine.step(batches.pop(0)) for _ in range(4)]
    engine.settle()
    engine.step(batch_of(world, 9))
    engine.settle()
    gc.collect()
    assert all(math.isfinite(one.loss) for one in results)
    return sum(one() is not None for one in alive)


def test_a_result_holds_no_batch() -> None:
    assert sum(threaded(2, results_kept)) == 0


def of_one_server(world: World) -> tuple[list[bool], list[Tensor]]:
    """A rank without pieces of the optimizer abstains, and all decide alike."""
    engine = build(
        copy.deepcopy(NET),
        "dp2:server",
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=adamw,
        world=world,
        options=Options(defer_reads=True, on_nan="skip", num_servers=1),
    )
    results = [engine.step(batch_of(world, index, bad=index == 1)) for index in range(3)]
    engine.settle()
    return [one.skipped for one in results], values_of(engine)


def test_ranks_that_own_nothing_decide_with_the_others() -> None:
    (one, _), (other, _) = threaded(2, of_one_server, plan="dp2:server")
    assert one == other == [False, True, False]


def with_momentum(world: World) -> bool:
    engine = build(
        copy.deepcopy(NET),
        "dp2",
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        world=world,
        options=Options(defer_reads=True, on_nan="skip"),
    )
    results = [engine.step(batch_of(world, index, bad=index == 0)) for index in range(3)]
    assert [one.skipped for one in results] == [True, False, False]
    return all(torch.isfinite(one).all() for one in values_of(engine))


def test_a_momentum_that_a_bad_first_step_would_leave_undefined_is_not_made() -> None:
    assert all(threaded(2, with_momentum))


# -- a loop
# ------------------------------------------------------------------------------------------


class Told(Hook):
    """The steps of which it is told, and how many the engine had made by then."""

    def __init__(self, engine: Engine, every: int) -> None:
        self.steps: list[tuple[int, int]] = []
        self._engine = engine
        self._every = every

    def needs_state(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def on_step(self, done: StepDone) -> None:
        assert math.isfinite(done.result.loss)
        self.steps.append((done.step, self._engine.step_index))


def told_in_a_loop(world: World, every: int) -> list[tuple[int, int]]:
    engine = engine_of(world)
    hook = Told(engine, every)
    fit(engine, [batch_of(world, index) for index in range(5)], 5, [hook])
    return hook.steps


def test_a_loop_tells_numbers_a_step_later() -> None:
    for steps in threaded(2, told_in_a_loop, 0):
        assert steps == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]


class Seconds(Hook):
    """The seconds of the steps of which it is told."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def needs_state(self, step: int) -> bool:
        return step == 3

    def on_step(self, done: StepDone) -> None:
        self.seconds.append(done.seconds)


def timed(world: World) -> tuple[list[float], float]:
    engine = engine_of(world)
    hook = Seconds()
    batches = [batch_of(world, index) for index in range(5)]
    began = time.perf_counter()
    fit(engine, batches, 5, [hook])
    return hook.seconds, time.perf_counter() - began


def test_the_seconds_of_steps_are_those_of_the_loop() -> None:
    for seconds, whole in threaded(2, timed):
        assert len(seconds) == 5 and all(one > 0.0 for one in seconds)
        assert sum(seconds) <= whole


def rolling_back(world: World, folder: Path) -> tuple[list[Any], list[Tensor], list[int]]:
    """A run whose last step is no number, once."""
    engine = engine_of(world, on_nan="back")
    left = [1]

    def damage(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_bad = engine.step_index == 4 and left[0] and world.rank == 1
        left[0] -= is_bad
        return output * math.nan if is_bad else output

    engine.model.register_forward_hook(damage)
    loader = Loader(SAMPLES, 4, dp_size=world.size, dp_rank=world.rank)
    hook = Told(engine, 0)
    checkpoints = Checkpoints(RunFolder(folder), every=3, saves_start=True)
    rollback = Rollback(folder, None)
    fit(engine, loader, 5, [hook, checkpoints, rollback], rollback=rollback)
    return rollback.recoveries, values_of(engine), [step for step, _ in hook.steps]


def test_a_last_step_that_is_no_number_is_made_again(tmp_path: Path) -> None:
    for recoveries, values, steps in threaded(2, rolling_back, tmp_path):
        (recovery,) = recoveries
        assert (recovery["step"], recovery["steps_repeated"]) == (4, 1)
        assert steps == [1, 2, 3, 4, 4, 5]
        assert all(torch.isfinite(one).all() for one in values)


class Counted(Hook):
    """A hook of a user, which may look at anything."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, done: StepDone) -> None:
        self.steps.append(done.step)


def with_a_hook_of_one_rank(world: World) -> list[int]:
    engine = engine_of(world, on_nan="skip")
    hooks = [Counted()] if world.rank == 0 else []
    fit(engine, [batch_of(world, index, bad=index == 2) for index in range(5)], 5, hooks)
    return hooks[0].steps if hooks else []


def test_a_hook_of_one_rank_alone_holds_up_no_other() -> None:
    assert threaded(2, with_a_hook_of_one_rank) == [[1, 2, 3, 4, 5], []]


def test_a_hook_that_looks_at_the_state_is_told_at_once() -> None:
    for steps in threaded(2, told_in_a_loop, 2):
        assert steps == [(1, 2), (2, 2), (3, 4), (4, 4), (5, 5)]
