"""Workers that are late, lost, and back: one server, and threads as its workers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from plait.outer import Asynchrony, Change
from plait.outer.async_server.key_server import KeyServer, Push


class Shop:
    """A server of one number, whose optimizer is plain descent with rate 1."""

    def __init__(self, num_workers: int, **options: float) -> None:
        self.grad, self.weight = torch.zeros(1), torch.zeros(1)
        asynchrony = Asynchrony(**options)  # type: ignore[arg-type]
        self.server = KeyServer(num_workers, 0, asynchrony, self.grad, self.apply)
        self.changes: list[Change] = []

    def apply(self, change: Change, unused: frozenset[int]) -> None:
        self.changes.append(change)
        self.weight -= change.factor * change.rate * self.grad

    def weights(self) -> Tensor:
        return self.weight.clone()

    def push(self, worker: int, step: int, grad: float = 1.0, count: float = 1.0) -> None:
        self.server.push(worker, Push(step, count, 0.0, torch.tensor([grad])))

    def step(self, worker: int, step: int, grad: float = 1.0) -> int:
        self.push(worker, step, grad)
        return self.server.collect(worker, self.weights)[0].staleness


def test_a_combined_update_is_the_mean_over_tokens_and_weighs_its_workers() -> None:
    shop = Shop(2, stale=0)
    shop.push(0, 0, grad=6.0, count=3.0)
    assert shop.weight.item() == 0
    shop.push(1, 0, grad=2.0, count=1.0)
    assert shop.weight.item() == -2.0
    assert shop.changes == [Change(0, 0.25, 1.0)]


def test_a_single_gradient_has_its_share_of_the_rate() -> None:
    shop = Shop(4, stale=8)
    assert shop.step(2, 5) == 0
    assert shop.changes == [Change(5, 1.0, 0.25)]


def test_old_gradients_move_less_where_asked() -> None:
    shop = Shop(2, stale=8, staleness_rate="inverse")  # type: ignore[arg-type]
    assert [shop.step(0, 0), shop.step(0, 1), shop.step(1, 0)] == [0, 0, 2]
    assert [change.rate for change in shop.changes] == [0.5, 0.5, 0.5 / 3]
    assert shop.server.histogram == {0: 2, 2: 1}


def test_a_lost_worker_releases_those_that_wait() -> None:
    shop = Shop(2, stale=0)
    waiting = threading.Thread(target=shop.step, args=(0, 0))
    waiting.start()
    shop.server.leave(1)
    waiting.join(5)
    assert not waiting.is_alive() and shop.weight.item() == -0.5


def test_a_late_worker_is_given_up_its_gradient_is_not_used_and_it_is_in_again() -> None:
    shop = Shop(2, stale=1, patience_seconds=0.01)
    assert [shop.step(0, step) for step in range(3)] == [
        0,
        0,
        0,
    ]  # the second waits, and gives worker 1 up
    before = shop.weight.clone()
    assert shop.step(1, 0, grad=100.0) == -1
    assert torch.equal(shop.weight, before) and shop.server.num_refused == 1
    assert shop.step(1, 1) == 0


def test_who_comes_back_gets_the_weights_of_now() -> None:
    shop = Shop(2, stale=4)
    shop.server.leave(1)
    shop.step(0, 0)
    receipt, weights = shop.server.join(1, shop.weights)
    assert receipt.version == 1 and torch.equal(weights, shop.weight)
    assert shop.step(1, 7) == 0
