"""What a rank may return, and what is said of the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from plait.errors import PlaitError
from plait.launcher import launch
from plait.launcher.result import check_sendable


def _function() -> Callable[[], int]:
    return lambda: 3


def _loss() -> torch.Tensor:
    return torch.ones(2, requires_grad=True).sum()


UNSENT = {"function": _function(), "loss": _loss(), "lock": threading.Lock(), "view": {}.values()}


@pytest.mark.parametrize("result", UNSENT.values(), ids=UNSENT)
def test_a_result_that_cannot_be_sent_is_named(
    result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(PlaitError, match="the result of rank 1 cannot be sent") as refused:
        check_sendable({"found": [result]})
    assert "return plain values" in str(refused.value)


def test_results_that_are_sent_pass() -> None:
    model = torch.nn.Linear(2, 2)
    check_sendable((None, 1.5, model, model.state_dict(), _loss().detach(), torch.nn.Linear))


@pytest.mark.parametrize("main", [_function, _loss])
def test_a_launch_says_so(main: Callable[[], object]) -> None:
    """Torch's agent alone would say that a rank ended with exit code 1."""
    with pytest.raises(PlaitError, match="the result of rank 0 cannot be sent to the launcher"):
        launch(main, nproc=1)
