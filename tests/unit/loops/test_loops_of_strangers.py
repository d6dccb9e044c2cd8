"""What loops do between a forward and an update: one device's numbers, or a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError, OptimizerError, PlanError
from plait.loops.calls import LossCalls
from plait.loops.module import make_module
from plait.loops.stand_in import check_norm, refuse_clip_by_value
from tests.unit.loops.test_module import Plain, net

Body = Callable[[Any, Any, dict[str, bool]], None]


@pytest.fixture(autouse=True)
def end_of_world() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(size, 7, generator=generator, dtype=torch.float64) for size in sizes]
    return [(one[:, :4], one[:, 4:]) for one in drawn]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def last_loss(model: Any, optimizer: Any, told: dict[str, bool], body: Body) -> float:
    body(model, optimizer, told)
    model.eval()
    with torch.no_grad():
        return float(model(*batches(8)[0])["loss"])


def under(body: Body, plan: str = "dp1") -> float:
    model, told = net(), {"more": False}
    parts = make_module(
        LossCalls(model, F.mse_loss),
        sgd(model.parameters()),
        f"{plan} precision:float64",
        more=lambda: told["more"],
    )
    return last_loss(*parts, told, body)


def plainly(body: Body) -> float:
    plain = Plain()
    return last_loss(plain, sgd(plain.parameters()), {}, body)


def accumulated(*sizes: int, scales: tuple[float, ...] = (0.5, 0.5)) -> Body:
    def body(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
        for index, (x, y) in enumerate(batches(*sizes)):
            last = index % 2 == 1 or index == len(sizes) - 1
            told["more"] = not last
            (scales[index % 2] * model(x, y)["loss"]).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return body


def two_forwards(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    (x, y), other = batches(8, 4)
    told["more"] = True
    first = model(x, y)["loss"]
    told["more"] = False
    (first + model(*other)["loss"]).backward()
    optimizer.step()


def zeroed_behind_the_forward(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    for x, y in batches(8, 8, 8):
        loss = model(x, y)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clipped_between(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    loss = model(*batches(8)[0])["loss"]
    loss.backward(retain_graph=True)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    loss.backward()
    optimizer.step()


RIGHT: dict[str, Body] = {
    "batches of several sizes": accumulated(8, 2, 6, 4, 8),
    "a short last update": accumulated(8, 8, 8),
    "two forwards and one backward": two_forwards,
    "zeroed between forward and backward": zeroed_behind_the_forward,
    "clipped between two backwards": clipped_between,
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("plan", ["dp1", "mb2"])
def test_a_loop_trains_as_on_one_device(plan: str, name: str) -> None:
    assert under(RIGHT[name], plan) == pytest.approx(plainly(RIGHT[name]), rel=1e-6)


def test_weights_by_counts_are_said_before() -> None:
    body = accumulated(8, 2, 6, 4, scales=(0.8, 0.2))

    def weighed(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
        model.weigh(by_counts=True)
        accumulated(8, 2, scales=(0.8, 0.2))(model, optimizer, told)

    assert under(weighed) == pytest.approx(plainly(accumulated(8, 2, scales=(0.8, 0.2))), rel=1e-6)
    with pytest.raises(ModelError, match=r"by 0\.8, 0\.2, .*added with the weights 1, 1, .*weigh"):
        under(body)


def a_step(change: Callable[[Any, Any, Tensor], Any]) -> Body:
    """A step whose loss or gradient is changed: `change` may give another loss."""

    def body(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
        for x, y in batches(8, 8):
            loss = model(x, y)["loss"]
            loss.backward()
            change(model, optimizer, loss)
            optimizer.step()
            optimizer.zero_grad()

    return body


def noise(model: Any, optimizer: Any, loss: Tensor) -> None:
    for param in model.parameters():
        param.grad.add_(1e-3)


def halved(model: Any, optimizer: Any, loss: Tensor) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def by_a_penalty(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    loss = model(*batches(8)[0])["loss"] + sum(param.abs().sum() for param in model.parameters())
    loss.backward()


def not_zeroed(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    for x, y in batches(8, 8):
        model(x, y)["loss"].backward()
        optimizer.step()


def without_a_backward(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    told["more"] = True
    model(*batches(8)[0])
    told["more"] = False
    model(*batches(8)[0])["loss"].backward()
    optimizer.step()


def unannounced(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    first = model(*batches(8)[0])["loss"]
    (first + model(*batches(8)[0])["loss"]).backward()


def zeroed_among(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    told["more"] = True
    model(*batches(8)[0])["loss"].backward()
    model(*batches(8)[0])
    optimizer.zero_grad()


def frozen(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
    for param in model.parameters():
        param.requires_grad = False
    model(*batches(8)[0])


CLIP = nn.utils.clip_grad_value_
REFUSED: dict[str, Body] = {
    "changed otherwise than by one factor, as by clip_grad_value_": a_step(
        lambda model, *_: CLIP(model.parameters(), 0.05)
    ),
    "changed otherwise than by one factor, .* by noise": a_step(noise),
    "a parameter of the prepared model was read or written": a_step(halved),
    "a penalty on weights belongs into the model's forward": by_a_penalty,
    r"call optimizer.zero_grad\(\) behind": not_zeroed,
    "a forward in training had no backward": without_a_backward,
    "say that gradients accumulate for all but the last": unannounced,
    "gradients were zeroed between a forward and its backward": zeroed_among,
    "freeze layers of the model before it is prepared": frozen,
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_a_loop_cannot_do_is_a_sentence(match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ModelError, match=match):
            under(REFUSED[match])


def test_a_group_that_is_added_later_is_refused() -> None:
    def body(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    with pytest.raises(OptimizerError, match="give the optimizer all groups before"):
        under(body)


def test_clips_by_other_norms_and_by_value_are_refused() -> None:
    check_norm(2)
    with pytest.raises(PlanError, match="norm_type=inf needs the numbers of all gradients"):
        check_norm(float("inf"))
    with pytest.raises(PlanError, match="clip by norm"):
        refuse_clip_by_value()


def test_an_update_leaves_random_numbers_to_the_loop() -> None:
    drawn: list[Tensor] = []

    def noise(model: Any, optimizer: Any, told: dict[str, bool]) -> None:
        torch.manual_seed(5)
        for x, y in batches(8, 8):
            model(x, y)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            drawn.append(torch.randn(4))

    for run in (plainly, under):
        run(noise)
    assert all(map(torch.equal, drawn[:2], drawn[2:]))
