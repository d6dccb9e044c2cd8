"""Copies from a device go by a stream of their own: after what came before, and in time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.checkpoint import Checkpoint, Shard, room
from plait.checkpoint.memory import MemoryCheckpoint, MemoryFile
from plait.checkpoint.room import Room, SideStream, side_stream_of
from plait.comm import World
from plait.engine.build import build
from plait.engine.state import saves_behind, snapshots
from plait.engine.state.saves_behind import SavesBehind
from plait.engine.state.snapshots import Snapshots, restore
from plait.launcher.board import Files
from tests.helpers.streams import FakeDevice
from tests.helpers.threaded import threaded

HOST = torch.device("cpu")
BATCH = (torch.randn(8, 4), torch.randn(8, 4))
needs_gpu = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def faked(monkeypatch: pytest.MonkeyPatch, eager: bool) -> tuple[FakeDevice, list[int]]:
    """A device whose tensors are those of the host, and the addresses of what it copies."""
    device = FakeDevice(eager=eager)
    far: list[int] = []

    def asked(rooms: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        far.extend(one.data_ptr() for one in values)
        device.current.ask(lambda: copied(rooms, values))

    copied = room.copy_each
    monkeypatch.setattr(room, "copy_each", asked)
    return device, far


@pytest.mark.parametrize("eager", [False, True])
def test_a_copy_sees_what_was_asked_before_and_nothing_after(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late or early: the copy is of the update that was asked for and had not been made."""
    device, gone = faked(monkeypatch, eager)
    memory = Room(SideStream(HOST, device))
    values = torch.ones(5)
    places = set()
    for step in (2, 3, 4):
        device.compute.ask(lambda step=step: values.fill_(step))  # type: ignore[misc]
        memory.mark()
        device.compute.ask(lambda: None)  # the next forward
        (kept,) = memory.copy([Shard.whole("weight", values)])
        assert kept.values.tolist() == [step] * 5
        places.add(kept.values.data_ptr())
    assert len(places) == 1  # the memory of the first is used again
    assert gone == [values.data_ptr()] * 3


def test_a_save_copies_the_state_of_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread begins to copy when the next step has been asked for."""
    device, _ = faked(monkeypatch, eager=True)
    memory = Room(SideStream(HOST, device))
    values = torch.ones(2)
    seen: list[float] = []
    device.compute.ask(lambda: values.fill_(2))  # type: ignore[arg-type, return-value]
    memory.mark()
    device.compute.ask(lambda: seen.append(float(values[0])))
    (kept,) = memory.copy([Shard.whole("weight", values)])
    assert kept.values.tolist() == [2, 2]


def test_shards_that_are_those_before_have_the_copies_before() -> None:
    memory = Room()
    shards = [Shard.whole("weight", torch.zeros(3)), Shard.whole("bias", torch.zeros(2))]
    first = memory.copy(shards)
    shards[0].values.fill_(1)
    again = memory.copy(list(shards))
    assert all(one is before for one, before in zip(again, first, strict=True))
    assert again[0].values.tolist() == [1, 1, 1]
    shards[1] = Shard.whole("bias", torch.full((2,), 2.0))  # the same form, another tensor
    assert [one.values.tolist() for one in memory.copy(shards)] == [[1, 1, 1], [2, 2]]
    one_less = memory.copy(shards[1:])
    assert [(one.name, one.values.tolist()) for one in one_less] == [("bias", [2, 2])]


def test_what_lies_on_the_host_is_copied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer state that is offloaded, and counts of steps."""
    device, gone = faked(monkeypatch, eager=False)

    class Half(SideStream):
        def has(self, tensor: Tensor) -> bool:
            return tensor.numel() > 1

    memory = Room(Half(HOST, device))
    memory.mark()
    weight, count = torch.arange(3.0), torch.tensor(7)
    far, near = memory.copy([Shard.whole("weight", weight), Shard.whole("count", count)])
    assert (far.values.tolist(), near.values.tolist()) == ([0, 1, 2], [7])
    assert gone == [weight.data_ptr()]
    assert memory.copy([]) == []


def test_the_host_has_no_side_stream() -> None:
    assert side_stream_of(HOST) is None


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_an_engines_snapshots_and_saves_come_by_the_stream(
    eager: bool, pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also into files that are pinned, as a launcher makes them."""
    device, gone = faked(monkeypatch, eager)
    for module in (snapshots, saves_behind):
        monkeypatch.setattr(module, "side_stream_of", lambda _: SideStream(HOST, device))
    if pinned:
        monkeypatch.setattr(SideStream, "pin", lambda side, memory: lambda: None)
    memory = Files(tmp_path)
    files = [[memory.make() for _ in range(2)] for _ in range(2)]
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    def run(world: World) -> Any:
        engine = build(
            copy.deepcopy(net),
            "dp2:zero1",
            loss=lambda output, target: (output - target).square().mean(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
            world=world,
        )
        taken = Snapshots(files[world.rank], engine)
        saves = SavesBehind(engine)
        for step in range(1, 4):
            engine.step(BATCH)
            expected = {one.name: one.values.clone() for one in engine.local_parameters()}
            engine.copies.add(taken.begin(step, {}))
            save = saves.begin(tmp_path / f"saved-{step}", {}, lambda: None)
            engine.copies.add(save.wait_for_copy)
            engine.step(BATCH)
            save.wait()
            assert save.failure is None
            world.axis("world").barrier()
            kept = MemoryCheckpoint([own[step % 2] for own in files])
            for source in (kept, Checkpoint.open(tmp_path / f"saved-{step}")):
                for one in engine.local_parameters():
                    whole = source.tensor(one.name).reshape(-1)[one.start : one.stop]
                    assert torch.equal(whole, expected[one.name]), one.name
            world.axis("world").barrier()
        restore(engine, [own[3 % 2] for own in files])
        assert engine.step_index == 5

    threaded(2, run)
    assert gone
    memory.close()


@pytest.mark.parametrize("_", [pytest.param(None, marks=needs_gpu)])
def test_a_snapshot_of_a_gpu_is_of_its_moment(_: None, tmp_path: Path) -> None:
    """Long work is queued before and after it; its memory is pinned, and used again."""
    device = torch.device("cuda", 0)
    memory = Room(side_stream_of(device))
    paths = [tmp_path / "0", tmp_path / "1"]
    for path in paths:
        path.touch()
    files = [MemoryFile(path, memory) for path in paths]
    weight = torch.zeros(1 << 24, device=device)
    busy = torch.randn(2048, 2048, device=device)
    for step in range(1, 5):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        weight.add_(1)
        copies = files[step % 2].begin(step, [Shard.whole("weight", weight.clone())], {})
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        copies()
        kept = MemoryCheckpoint([paths[step % 2]])
        assert kept.tensor("weight").unique().tolist() == [step]
    (room_of_it,) = memory.copy([Shard.whole("weight", weight)])
    assert room_of_it.values.is_pinned()
