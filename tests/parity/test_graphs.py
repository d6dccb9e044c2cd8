"""Steps that are recorded once and replayed have the bits of steps that are not.

CUDA graphs exist on GPUs alone (`tests/accelerator/test_graphs.py`). Here a recorder of torch's
operations stands for them: it replays the same operations on the same memory, and no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait import comm
from plait.comm import World
from plait.comm.simulated import simulate
from plait.engine import graphs, one_pass
from plait.engine.adamw import plain_kernel
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.open_step import OpenStep
from plait.errors import NotAvailable
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.models.mlp import MLP
from plait.plan import Plan
from tests.helpers.recorded import RecordedOnHost
from tests.parity.families import family_of

STEPS = 7
Found = tuple[list[float], dict[str, Tensor], int]
Act = Callable[[Engine, int], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[RecordedOnHost]:
    made: list[RecordedOnHost] = []

    def recorder_of(device: torch.device) -> RecordedOnHost:
        made.append(RecordedOnHost())
        return made[-1]

    monkeypatch.setattr(graphs, "recorder_of", recorder_of)
    return made


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def batches(family: str) -> list[Any]:
    """Batches that all differ."""
    return replace(family_of(family), num_steps=STEPS).batches(6)


def alone(act: Callable[[World], Any]) -> Any:
    """The result of a function of the one rank of this process."""
    world = comm.init(Mesh())
    try:
        return act(world)
    finally:
        world.close()


def engine_of(world: World, plan: str, family: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    return build(
        family_of(family).model(),
        plan,
        loss=cross_entropy,
        optimizer=adamw,
        options=Options(linear_product="torch", **options),
        world=world,
    )


def run(plan: str, family: str, between: Act = lambda engine, step: None, **options: Any) -> Found:
    """Losses and norms of the steps, all values after them, and the steps that were replayed."""

    def act(world: World) -> Found:
        engine = engine_of(world, plan, family, **options)
        numbers: list[float] = []
        for step, batch in enumerate(batches(family)):
            result = engine.step(batch)
            numbers += [result.loss, result.grad_norm]
            between(engine, step)
        values = {name: value.detach().clone() for name, value in engine.model.state_dict().items()}
        for piece in engine.strategy.pieces:
            for name, value in engine.update.optimizer.state[piece.value].items():
                values[f"{piece.name} {name}"] = value.clone()
        made = engine.graphs
        return numbers, values, 0 if made is None else made.num_replays

    found: Found = alone(act)
    return found


def assert_same(found: Found, plain: Found) -> None:
    assert found[0] == plain[0]
    assert found[1].keys() == plain[1].keys()
    for name, value in plain[1].items():
        assert torch.equal(found[1][name], value), name


CELLS = [
    *(("dp1", "gpt", {}), ("dp1", "llama", {}), ("dp1 mb3", "gpt", {})),
    *(("dp1 precision:bf16", "gpt", {}), ("dp1 mb2 precision:bf16", "llama", {})),
    *(("dp1 remat:full", "gpt", {}), ("dp1 mb2 remat:selective", "llama", {})),
    *(("dp1", "resnet", {}), ("dp1", "hf-llama", {}), ("dp1 mb2", "hf-gpt2", {})),
    ("dp1", "gpt", {"clip_grad_norm": 0.1}),
    ("dp1 mb2", "gpt", {"learning_rate": lambda step: (step + 1) / STEPS, "clip_grad_norm": 0.5}),
]


@pytest.mark.parametrize(("plan", "family", "options"), CELLS)
def test_a_replay_has_the_bits_of_a_step(
    plan: str, family: str, options: dict[str, Any], recorders: list[RecordedOnHost]
) -> None:
    found = run(plan, family, cuda_graphs=True, **options)
    assert found[2] == STEPS - graphs.WARM_UP_STEPS
    assert [len(one.graphs) for one in recorders] == [1]
    assert_same(found, run(plan, family, **options))


def evaluates_saves_and_loads(folder: Path) -> Act:
    """What a run does between steps: evaluation, a checkpoint, and going back to it."""

    def between(engine: Engine, step: int) -> None:
        if step == 5:
            engine.evaluate(batches("gpt")[0])
            engine.save(folder)
        if step == 6:
            engine.load(folder)

    return between


def test_nor_does_what_comes_between_steps_change_a_bit(
    tmp_path: Path, recorders: list[RecordedOnHost]
) -> None:
    plain = run("dp1 precision:bf16", "gpt", evaluates_saves_and_loads(tmp_path / "plain"))
    between = evaluates_saves_and_loads(tmp_path / "graphs")
    found = run("dp1 precision:bf16", "gpt", between, cuda_graphs=True)
    assert found[2] == STEPS - graphs.WARM_UP_STEPS
    assert_same(found, plain)


def test_another_shape_gets_a_graph_of_its_own(
    monkeypatch: pytest.MonkeyPatch, recorders: list[RecordedOnHost]
) -> None:
    """Every second batch is smaller; graphs share buffers, and steps without one use them too."""
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    known = [
        batch if index % 2 else tuple(part[:4] for part in batch)
        for index, batch in enumerate(batches("gpt"))
    ]
    monkeypatch.setitem(globals(), "batches", lambda family: known)
    found = run("dp1 mb2", "gpt", cuda_graphs=True)
    assert found[2] == STEPS - 2
    assert [len(one.graphs) for one in recorders] == [2]
    assert_same(found, run("dp1 mb2", "gpt"))
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    few = run("dp1 mb2", "gpt", cuda_graphs=True)
    assert len(recorders[1].graphs) == 1
    assert_same(few, found)


def test_a_parameter_that_stops_to_train_gets_a_new_graph(
    monkeypatch: pytest.MonkeyPatch, recorders: list[RecordedOnHost]
) -> None:
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)

    def between(engine: Engine, step: int) -> None:
        if step == 4:
            engine.model.get_parameter("position.weight").requires_grad_(False)

    found = run("dp1", "gpt", between, cuda_graphs=True)
    assert [len(one.graphs) for one in recorders] == [2]
    assert_same(found, run("dp1", "gpt", between))


def test_one_pass_reads_the_gradients_of_a_graph(
    monkeypatch: pytest.MonkeyPatch, recorders: list[RecordedOnHost]
) -> None:
    monkeypatch.setattr(one_pass, "is_at_hand", lambda device, make_optimizer: True)
    monkeypatch.setattr(one_pass, "kernel_of_gpus", lambda: plain_kernel)
    found = run("dp1 precision:bf16", "gpt", cuda_graphs=True, clip_grad_norm=0.5)
    assert found[2] == STEPS - graphs.WARM_UP_STEPS
    assert_same(found, run("dp1 precision:bf16", "gpt", clip_grad_norm=0.5))


def test_a_step_that_is_no_number_is_dropped_and_named(recorders: list[RecordedOnHost]) -> None:
    """The guard looks at the sums and replays the forward, both after a graph."""

    def steps(world: World, **options: Any) -> tuple[list[Any], list[str]]:
        engine = engine_of(world, "dp1 mb2", "resnet-batch", on_nan="skip", **options)
        told: list[str] = []
        engine.guard.listeners.append(lambda finding: told.append(finding.where))
        found = []
        for index, (inputs, targets) in enumerate(batches("resnet-batch")):
            if index == 5:
                inputs[4, 0, 0, 0] = float("nan")
            result = engine.step((inputs, targets))
            state = {name: value.clone() for name, value in engine.model.state_dict().items()}
            found.append((result.skipped, repr(result.loss), state))
        return found, told

    found, told = alone(partial(steps, cuda_graphs=True))
    plain, wanted = alone(steps)
    assert len(recorders[0].graphs) == 1
    assert told == wanted == ["the batch, micro-batch 1, sample 1"]
    for (skipped, loss, state), (skips, other, values) in zip(found, plain, strict=True):
        assert (skipped, loss) == (skips, other)
        assert [name for name in values if not torch.equal(state[name], values[name])] == []


def test_an_outside_loop_goes_without_and_may_take_turns(recorders: list[RecordedOnHost]) -> None:
    def steps(world: World, **options: Any) -> list[float]:
        engine = engine_of(world, "dp1", "gpt", **options)
        outside = OpenStep.of(engine)
        found = []
        for index, batch in enumerate(batches("gpt")):
            if index in (2, 5):
                found.append(outside.forward_backward(batch, more=True).mean)
                found.append(outside.forward_backward(batch).mean)
                outside.update()
            else:
                found.append(engine.step(batch).loss)
        return found

    assert alone(partial(steps, cuda_graphs=True)) == alone(steps)
    assert len(recorders[0].graphs) == 1


def test_a_step_that_cannot_be_recorded_is_computed(
    monkeypatch: pytest.MonkeyPatch, recorders: list[RecordedOnHost]
) -> None:
    plain_forward = MLP.forward

    def looks(self: MLP, x: Tensor) -> Tensor:
        y: Tensor = plain_forward(self, x)
        return y if float(y.detach().sum()) > 0 else y * 2.0

    monkeypatch.setattr(MLP, "forward", looks)
    with pytest.warns(UserWarning, match="cannot be recorded .*the host reads a value.*without"):
        found = run("dp1 mb2", "mlp", cuda_graphs=True)
    assert found[2] == 0
    assert_same(found, run("dp1 mb2", "mlp"))


def test_layers_that_draw_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, recorders: list[RecordedOnHost]
) -> None:
    known = family_of("gpt")
    drops = replace(known, keys={**known.keys, "dropout": 0.1}, num_steps=STEPS)
    monkeypatch.setitem(globals(), "family_of", lambda family: drops)
    with pytest.warns(UserWarning, match="layers draw random numbers"):
        found = run("dp1 mb2 remat:full", "gpt", cuda_graphs=True)
    assert found[2] == 0
    assert_same(found, run("dp1 mb2 remat:full", "gpt"))


@pytest.mark.parametrize(
    ("plan", "family", "options", "reason"),
    [
        ("dp2", "gpt", {}, "has 2 ranks"),
        ("dp1", "gpt", {"float16": True}, "float16 has a scale"),
        ("dp1", "gpt", {"offload_activations": True}, "offload_activations moves"),
        ("dp1", "gpt", {"fixed_order": True}, "fixed_order adds"),
        ("dp1", "gpt", {"aggregate": "mean"}, "reads the count"),
        ("dp1", "mixtral-plain", {}, "routers"),
    ],
)
def test_what_has_no_graph_says_so_and_trains(
    plan: str,
    family: str,
    options: dict[str, Any],
    reason: str,
    recorders: list[RecordedOnHost],
) -> None:
    def act(world: World) -> tuple[bool, float]:
        engine = engine_of(world, plan, family, cuda_graphs=True, **options)
        return engine.graphs is None, engine.step(batches(family)[0]).loss

    with pytest.warns(UserWarning, match=f"cuda_graphs: .*{reason}.*; steps run without graphs"):
        found = simulate(Mesh.of(Plan.parse(plan)), act)
    assert all(is_none and loss > 0 for is_none, loss in found)


def test_a_processor_has_none() -> None:
    with pytest.raises(NotAvailable, match="records the kernels of a GPU"):
        run("dp1", "gpt", cuda_graphs=True)
