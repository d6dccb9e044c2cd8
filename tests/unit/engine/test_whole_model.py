"""A model that a pipeline has cut is neither called, read nor copied as a whole by one rank."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import plait
from plait.comm import World
from plait.parallel.data.absent import Absent
from tests.helpers.threaded import threaded


class Branched(nn.Module):
    """No chain: its stages replay its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        return self.head(hidden + self.second(hidden))


class Cached(nn.Module):
    """A layer that keeps a table from its first call on."""

    table: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6, dtype=inputs.dtype).cos()
        return self.linear(inputs).tanh() * self.table


class Skipping(nn.Module):
    """No chain, of layers with tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Cached(), Cached(), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.head(hidden + self.second(hidden))


def chain_of_tables() -> nn.Module:
    return nn.Sequential(Cached(), Cached(), Cached(), nn.Linear(6, 3))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def twice(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Equal models of two ranks."""
    model = make()
    return [model, copy.deepcopy(model)]


def trained(world: World, model: nn.Module, plan: str) -> plait.Engine:
    """An engine after a step and an evaluation, which the guard lets pass."""
    engine = plait.build(model, plan, loss=F.cross_entropy, optimizer=torch.optim.SGD, world=world)
    batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    engine.step(batch)
    engine.evaluate(batch)
    return engine


def refused(model: nn.Module, action: Callable[[nn.Module], object]) -> str:
    with pytest.raises(plait.errors.ModelError) as caught:
        action(model)
    return str(caught.value)


def call(model: nn.Module) -> object:
    return model(torch.ones(2, 6))


def saved(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("make", [chain, Branched])
def test_calls_and_states_of_a_cut_model_are_refused(make: Callable[[], nn.Module]) -> None:
    models = twice(make)

    def work(world: World) -> list[str]:
        model = trained(world, models[world.rank], "pp2").model
        return [refused(model, one) for one in (call, nn.Module.state_dict, saved)]

    for called, state, pickled in threaded(2, work, plan="pp2"):
        assert "cannot be called on one rank" in called
        assert "cut it into 2 stages" in called
        assert "engine.measure(batch, [function])" in called
        assert "engine.save_pretrained(path)" in state
        assert "a model cannot be pickled on one rank: a pipeline has cut it into 2" in pickled


def written(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.ones(param.shape))


READERS: dict[str, Callable[[nn.Module], object]] = {
    "average": lambda model: [param.lerp(param, 0.1) for param in model.parameters()],
    "norm": lambda model: [param.norm() for param in model.parameters()],
    "norms": lambda model: torch._foreach_norm(list(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "data": lambda model: [param.data for param in model.parameters()],
    "copy": copy.deepcopy,
    "averaged model": AveragedModel,
    "written": written,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("make", "names"),
    [(chain, ("2.weight", "0.weight")), (Branched, ("second.weight", "first.weight"))],
)
def test_a_parameter_of_another_stage_is_not_read(
    make: Callable[[], nn.Module], names: tuple[str, str], reader: str
) -> None:
    models = twice(make)

    def work(world: World) -> str:
        model = trained(world, models[world.rank], "pp2").model
        return refused(model, READERS[reader])

    for rank, text in enumerate(threaded(2, work, plan="pp2")):
        other = 1 - rank
        place = f"is in stage {other} of 2, on rank {other} of pp, and this rank has no numbers"
        assert text.startswith(f"the parameter '{names[rank]}' [6, 6] {place}")
        assert "engine.local_parameters() has those of this rank" in text


class Borrowing(nn.Module):
    """A layer that reads the weight of another one, which is not its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.others = [other]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.others[0].weight.sum()


def test_a_block_that_reads_a_parameter_of_another_stage() -> None:
    def borrowing() -> nn.Module:
        first = nn.Linear(6, 6)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), Borrowing(first))

    models = twice(borrowing)
    match = r"'0\.weight' \[6, 6\] is in stage 0 of 2, .* belongs in that stage \(plait\.Cutting"
    with pytest.raises(plait.errors.ModelError, match=match):
        threaded(2, lambda world: trained(world, models[world.rank], "pp2"), plan="pp2")


@pytest.mark.parametrize("plan", ["pp2", "pp2:1f1b mb2", "pp2:interleaved,v2 mb2"])
def test_a_parameter_of_another_stage_is_described(plan: str) -> None:
    models = twice(chain)

    def work(world: World) -> list[object]:
        model = trained(world, models[world.rank], plan).model
        params = dict(model.named_parameters())
        torch.optim.SGD(params.values(), lr=0.1).zero_grad()
        assert repr(model) == repr(chain())
        assert model.to("cpu").float() is model
        assert sum("on another rank of pp" in repr(param) for param in params.values()) in (2, 4)
        assert sum("on another rank of pp" in f"{param}" for param in params.values()) in (2, 4)
        return [
            (name, list(one.shape), one.numel(), one.dtype, one.device.type, one.requires_grad)
            for name, one in params.items()
        ]

    expected = [
        (name, list(one.shape), one.numel(), torch.float32, "cpu", True)
        for name, one in chain().named_parameters()
    ]
    assert threaded(2, work, plan=plan) == [expected, expected]


@pytest.mark.parametrize("plan", ["pp2 mb2", "dp2:zero3"])
def test_a_conversion_that_changes_nothing_passes(plan: str) -> None:
    def losses(world: World, model: nn.Module, converts: bool) -> list[float]:
        engine = trained(world, model, plan)
        if converts:
            model.to("cpu", torch.float32)
            absent = next(one for one in model.parameters() if isinstance(one, Absent))
            with pytest.raises(plait.errors.ModelError, match="numbers"):
                absent.double()
        batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
        return [engine.step(batch).loss for _ in range(2)]

    made = twice(chain)
    plain, converted = copy.deepcopy(made), copy.deepcopy(made)
    expected = threaded(2, lambda world: losses(world, plain[world.rank], False), plan=plan)
    found = threaded(2, lambda world: losses(world, converted[world.rank], True), plan=plan)
    assert found == expected


def test_own_parameters_are_averaged_by_their_names() -> None:
    models = twice(chain)

    def work(world: World) -> set[str]:
        engine = trained(world, models[world.rank], "pp2")
        averages = {one.name: one.values.clone() for one in engine.local_parameters()}
        engine.step((torch.ones(4, 6), torch.zeros(4, dtype=torch.long)))
        for one in engine.local_parameters():
            averages[one.name].lerp_(one.values, 0.1)
        return set(averages)

    first, second = threaded(2, work, plan="pp2")
    assert not first & second
    assert first | second == set(dict(chain().named_parameters()))


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero2", "tp2"])
def test_a_model_that_is_whole_on_its_rank_may_be_called(plan: str) -> None:
    models = twice(chain)

    def work(world: World) -> tuple[int, ...]:
        return tuple(trained(world, models[world.rank], plan).model(torch.ones(2, 6)).shape)

    assert threaded(2, work, plan=plan) == [(2, 3), (2, 3)]


def test_a_model_may_be_called_again_under_an_engine_of_one_stage() -> None:
    models = twice(chain)

    def cut(world: World) -> None:
        trained(world, models[world.rank], "pp2")

    def whole(world: World) -> int:
        model = models[world.rank]
        plait.build(model, "dp1", loss=F.cross_entropy, optimizer=torch.optim.SGD, world=world)
        return len(model.state_dict())

    threaded(2, cut, plan="pp2")
    with pytest.warns(UserWarning, match="cut into stages by an earlier engine, and has zeros"):
        assert threaded(1, whole, plan="dp1") == [6]


BATCH = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("plan", ["dp2", "pp2:1f1b mb2"])
@pytest.mark.parametrize("call", [plait.Engine.step, plait.Engine.evaluate])
def test_zeros_of_an_earlier_engine_are_not_trained(
    plan: str, call: Callable[[plait.Engine, object], object], tmp_path: Path
) -> None:
    models = twice(chain)

    def first(world: World) -> float:
        engine = trained(world, models[world.rank], "pp2")
        engine.save(tmp_path / "first")
        return engine.evaluate(BATCH)

    def second(world: World) -> float:
        engine = plait.build(
            models[world.rank], plan, loss=F.cross_entropy, optimizer=torch.optim.SGD, world=world
        )
        with pytest.raises(plait.errors.ModelError, match=r"has zeros .* engine\.load"):
            call(engine, BATCH)
        engine.load(tmp_path / "first")
        return engine.evaluate(BATCH)

    before = threaded(2, first, plan="pp2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = threaded(2, second, plan=plan)
    assert after == pytest.approx(before)
    assert not [one for one in caught if "initial values" in str(one.message)]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("plan", ["dp2", "tp2", "pp2", "pp2:1f1b mb2"])
@pytest.mark.parametrize("make", [chain_of_tables, Skipping])
def test_a_cut_model_is_built_again_under_any_plan(
    make: Callable[[], nn.Module], plan: str, tmp_path: Path
) -> None:
    models = twice(make)

    def work(world: World, plan: str, path: Path | None) -> None:
        engine = plait.build(
            models[world.rank], plan, loss=F.cross_entropy, optimizer=torch.optim.SGD, world=world
        )
        engine.prepare([BATCH])
        if path is not None:
            engine.load(path)
        engine.step(BATCH)
        engine.evaluate(BATCH)
        engine.save(tmp_path / "first")

    threaded(2, work, "pp2", None, plan="pp2")
    threaded(2, work, plan, tmp_path / "first", plan=plan)
