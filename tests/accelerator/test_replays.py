"""Replays whose messages are tensors of a GPU, by the operations that NCCL has.

Nothing in a replay asks which backend there is. The ranks are threads that refuse what NCCL
refuses. A trial on the CPU asks the same question.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.run import replica_replay
from tests.accelerator.on_device import is_there, sharing
from tests.unit.doctor.test_replicas import train_with_a_wrong_update

on_gpu = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
]
DEVICES = ["cpu", pytest.param("cuda:0", marks=on_gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=["cpu", "gpu"])
@pytest.mark.parametrize("plan", ["dp2", "pp2:gpipe dp2 mb2"])
def test_a_wrong_update_is_told_by_a_replay_of_machines(
    plan: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank stands for a machine, so the kept states of all are sent."""
    monkeypatch.setattr(replica_replay, "machine", lambda: threading.current_thread().name)
    size = 2 if plan == "dp2" else 4
    wrong = size // 2
    run = sharing(device)
    ((found,), message), *others = run(
        size, train_with_a_wrong_update, plan, {wrong: {4}}, 2, device, plan=plan
    )
    assert (found.rank, found.step) == (wrong, 4)
    assert "a replay of its update from step 3 gives other bits" in message
    assert all(same == message for _, same in others)


class Sent:
    """An axis that notes where the tensors lie that are broadcast."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []

    def broadcast(self, tensor: Tensor, root: int) -> Sent:
        self.places.append((tensor.device.type, tensor.numel()))
        return self

    def wait(self) -> None: ...


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kept_state_is_sent_from_the_device_where_there_is_none(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values: the state lies on the host, and each message on the device."""
    monkeypatch.setattr(replica_replay, "BLOCK_BYTES", 64)
    axis = Sent()
    world: Any = SimpleNamespace(rank=rank, device=torch.device("meta"), axis=lambda _: axis)
    with FakeTensorMode():
        content = torch.empty(150, dtype=torch.uint8)
        replica_replay._send_to_all(world, content, 0)
    assert content.device.type == "cpu"
    assert axis.places == [("meta", 64), ("meta", 64), ("meta", 22)]
