"""A parameter of ZeRO-3 has no numbers between its uses: a reader gets them, or a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.threaded import threaded

BATCH = torch.ones(4, 12), torch.zeros(4, 12)
READERS: dict[str, Callable[[nn.Module], object]] = {
    "sum": lambda model: model.get_parameter("0.weight").sum(),
    "data": lambda model: model.get_parameter("0.weight").data,
    "transposed": lambda model: model.get_parameter("0.weight").T,
    "detached": lambda model: model.get_parameter("0.weight").detach(),
    "state": lambda model: {key: value.clone() for key, value in model.state_dict().items()},
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "copied": lambda model: copy.deepcopy(model.get_parameter("0.weight")),
    "written": lambda model: nn.init.zeros_(model.get_parameter("0.weight")),
    "typed": lambda model: model.get_parameter("0.weight").type_as(torch.ones(1).double()),
    "numpy": lambda model: model.get_parameter("0.weight").numpy(force=True),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


def steps(
    world: World, models: list[nn.Module], plan: str, read: Callable[[nn.Module], object]
) -> list[object]:
    """What is read after the build, and after each of two steps."""
    model = models[world.rank]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, world=world)
    found = [read(model)]
    for batch in engine.prepare([BATCH, BATCH]):
        engine.step(batch, trace=False)
        found.append(read(model))
    return found


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_between_two_steps_is_told(reader: str) -> None:
    models: list[nn.Module] = [net(), net()]
    match = r"the parameter '0\.weight' \[12, 12\] is in shards of 2 ranks between two steps"
    with pytest.raises(ModelError, match=match):
        threaded(2, steps, models, "dp2:zero3", READERS[reader], plan="dp2:zero3")


def test_shape_and_kind_are_known_at_any_time() -> None:
    def described(model: nn.Module) -> object:
        param = model.get_parameter("0.weight")
        like = torch.zeros_like(param)
        assert isinstance(param, nn.Parameter) and "in shards" in repr(param)
        return tuple(param.shape), param.numel(), param.dtype, param.grad is None, like.sum().item()

    models: list[nn.Module] = [net(), net()]
    found = threaded(2, steps, models, "dp2:zero3", described, plan="dp2:zero3")
    assert found[0] == [((12, 12), 144, torch.float32, True, 0.0)] * 3


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    """The losses of three steps and of an evaluation, with a penalty on all parameters."""
    model = models[world.rank].double()

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum(param.square().sum() for param in model.parameters())
        return F.mse_loss(output, target.double()) + 0.01 * penalty

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.build(model, plan, loss=penalised, optimizer=sgd, world=world)
    batches = engine.prepare([(BATCH[0].double(), BATCH[1])] * 3)
    found = [engine.step(batch, trace=False).loss for batch in batches]
    return [*found, engine.evaluate((BATCH[0].double()[:2], BATCH[1][:2]))]


@pytest.mark.parametrize("more", ["", " mb2", " remat:full"])
def test_a_loss_with_a_penalty_on_parameters_equals_one_device(more: str) -> None:
    whole, parted = (
        threaded(size, losses, [net() for _ in range(size)], plan, plan=plan)[0]
        for size, plan in ((1, "dp1 precision:float64"), (2, f"dp2:zero3 precision:float64{more}"))
    )
    assert parted == pytest.approx(whole, rel=1e-12)


def test_a_second_engine_of_a_model_in_shards_is_refused() -> None:
    def again(model: nn.Module) -> object:
        return plait.build(model, "dp1", loss=F.mse_loss, optimizer=torch.optim.SGD)

    models: list[nn.Module] = [net(), net()]
    with pytest.raises(
        ModelError, match=r"'0\.weight' and 3 more of Sequential is in shards of an"
    ):
        threaded(2, steps, models, "dp2:zero3", again, plan="dp2:zero3")


def test_an_evaluation_sees_the_numbers_that_its_shards_have_now() -> None:
    """The loss of the evaluation before has taken the parameters that it reads."""

    def run(world: World, models: list[nn.Module]) -> list[float]:
        model = models[world.rank]

        def penalty(output: Tensor, target: Tensor) -> Tensor:
            squares = [param.square().sum() for param in model.parameters()]
            return output.mean() * 0 + torch.stack(squares).sum()

        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plait.build(model, "dp2:zero3", loss=penalty, optimizer=sgd, world=world)
        share = (BATCH[0][:2], BATCH[1][:2])
        found = [engine.evaluate(share)]
        for shard in engine.local_parameters():
            shard.values.zero_()
        return [*found, engine.evaluate(share)]

    models: list[nn.Module] = [net(), net()]
    first, second = threaded(2, run, models, plan="dp2:zero3")[0]
    assert first > 0 and second == 0


def test_a_forward_that_breaks_gathers_nothing_afterwards() -> None:
    def run(world: World, models: list[nn.Module]) -> bool:
        model = models[world.rank]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plait.build(model, "dp2:zero3", loss=F.mse_loss, optimizer=sgd, world=world)
        hook = model.get_submodule("1").register_forward_hook(broken)
        with pytest.raises(OSError, match="no sample"):
            engine.step((BATCH[0][:2], BATCH[1][:2]), trace=False)
        hook.remove()
        return "in shards" in repr(model.get_submodule("2").weight)

    models: list[nn.Module] = [net(), net()]
    assert threaded(2, run, models, plan="dp2:zero3") == [True, True]


def broken(*_: object) -> None:
    raise OSError("no sample")


class Forces(nn.Module):
    """Forces as the gradient of an energy, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 1)])

    def forward(self, positions: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            hidden = positions
            for layer in self.layers:
                hidden = layer(hidden).tanh()
            return -torch.autograd.grad(hidden.sum(), positions, create_graph=self.training)[0]


def forces(world: World, models: list[nn.Module], plan: str) -> list[float]:
    """The losses of three steps and of an evaluation."""
    model = models[world.rank].double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, world=world)
    whole = BATCH[0].double(), BATCH[1].double()
    found = [engine.step(batch, trace=False).loss for batch in engine.prepare([whole] * 3)]
    return [*found, engine.evaluate((whole[0][:2], whole[1][:2]))]


@pytest.mark.parametrize("more", ["", " mb2", " remat:full"])
def test_a_forward_that_takes_a_gradient_equals_one_device(more: str) -> None:
    plan = f"dp2:zero3 precision:float64{more}"
    alone = "dp1 precision:float64"
    whole = threaded(1, forces, [Forces()], alone, plan=alone)[0]
    parted = threaded(2, forces, [Forces(), Forces()], plan, plan=plan)[0]
    assert parted == pytest.approx(whole, rel=1e-12)


def test_a_pipeline_refuses_a_forward_that_takes_a_gradient() -> None:
    plan = "pp2 mb2 precision:float64"
    with pytest.raises(ModelError, match="the forward of Forces or the loss takes a gradient"):
        threaded(2, forces, [Forces(), Forces()], plan, plan=plan)
