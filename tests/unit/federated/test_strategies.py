from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from plait.errors import ConfigError, RunError
from plait.outer.federated.messages import Reply, check_reply
from plait.outer.federated.strategies import StrategySettings, make

WEIGHTS = torch.tensor([1.0, -2.0, 3.0])


def replies(
    changes: Sequence[Sequence[float]], examples: Sequence[int] | None = None
) -> list[Reply]:
    counts = examples or [1] * len(changes)
    return [
        Reply(i, 1, n, torch.tensor(c))
        for i, (c, n) in enumerate(zip(changes, counts, strict=True))
    ]


def step(name: str, given: list[Reply], times: int = 1, **settings: float) -> Tensor:
    strategy = make(name, StrategySettings(**settings))
    weights = WEIGHTS  # type: ignore[arg-type]
    for _ in range(times):
        weights = strategy.apply(weights, strategy.combine(given))
    return weights


def test_fedavg_weighs_by_examples_in_any_order_of_arrival() -> None:
    given = replies([[1.0, 0, 0], [4.0, 3, 0]], [3, 1])
    expected = WEIGHTS + torch.tensor([1.75, 0.75, 0])
    assert torch.equal(step("fedavg", given), expected) and torch.equal(
        step("fedavg", given[::-1]), expected
    )


def test_fedavgm() -> None:
    given = replies([[1.0, 0, 0]])
    assert torch.allclose(
        step("fedavgm", given, 2, momentum=0.5), WEIGHTS + torch.tensor([1.0 + 1.5, 0, 0])
    )


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_adaptive_rules_by_hand(name: str) -> None:
    lr = 0.1
    tau = 0.01
    b1 = 0.9
    b2 = 0.99
    d = 0.5
    second = tau**2
    second = (
        b2 * second + (1 - b2) * d * d
        if name == "fedadam"
        else second - (1 - b2) * d * d * (1 if second > d * d else -1)
    )
    expected = 1.0 + lr * (1 - b1) * d / (second**0.5 + tau)
    assert step(name, replies([[d, 0, 0]]), lr=lr, tau=tau)[0].item() == pytest.approx(expected)


HONEST = [[0.9, 0, 1], [1.0, 0, 1], [1.1, 0, 1], [1.0, 0.1, 1], [1.0, -0.1, 1]]
BAD = [[1000.0, 1000, -1000]]


@pytest.mark.parametrize("name", ["trimmed", "median", "krum"])
def test_robust_rules_bear_a_bad_client_and_the_mean_does_not(name: str) -> None:
    given = replies([*HONEST, *BAD], [1] * 5 + [10**6])
    moved = step(name, given) - WEIGHTS
    assert (moved - torch.tensor([1.0, 0, 1])).abs().max() < 0.2
    assert (step("fedavg", given) - WEIGHTS).abs().max() > 100


def test_median_and_trimmed_mean_by_hand() -> None:
    given = replies([[1.0, 0, 0], [2.0, 0, 0], [4.0, 0, 0], [9.0, 0, 0]])
    assert (step("median", given) - WEIGHTS)[0] == 3.0
    assert (step("trimmed", given, trim=0.25) - WEIGHTS)[0] == 3.0


def test_krum_gives_one_of_the_changes() -> None:
    moved = step("krum", replies([*HONEST, *BAD])) - WEIGHTS
    assert any(torch.allclose(moved, torch.tensor(change), atol=1e-6) for change in HONEST)


def test_scaffold_moves_its_control_by_the_share_that_took_part() -> None:
    strategy = make("scaffold", StrategySettings(num_clients=4))
    strategy.extra(WEIGHTS)
    one = torch.ones(3)
    strategy.note(
        [
            Reply(0, 1, 9, one, extra={"control": one}),
            Reply(1, 1, 1, one, extra={"control": 3 * one}),
        ]
    )
    assert torch.equal(strategy.extra(WEIGHTS)["control"], one)


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fedadam'"):
        make("fedadm", StrategySettings())


@pytest.mark.parametrize(
    "reply",
    [
        Reply(0, 1, 5, torch.zeros(2, 3)),
        Reply(0, 1, 5, torch.zeros(4)),
        Reply(0, 1, 5, torch.full((3,), float("nan"))),
        Reply(0, 1, 5, torch.zeros(3), extra={"images": torch.zeros(8)}),
        Reply(0, 1, 5, torch.zeros(3), metrics={"label_0": 3.0}),
        Reply(0, 1, 5, torch.zeros(3), metrics={"accuracy": float("inf")}),
    ],
)
def test_what_is_no_vector_over_the_parameters_is_refused(reply: Reply) -> None:
    with pytest.raises(RunError, match="client 0 sent"):
        check_reply(reply, 3)
