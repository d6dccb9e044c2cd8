"""Snapshots and checkpoints beside the next step, on a GPU: bit for bit the state of their step.

The update is late: long work stands before it in the device's queue. So a copy that does not wait
for it has the state before, which the last test shows. A trial on the CPU asks the same question.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.checkpoint import Checkpoint
from plait.checkpoint.memory import MemoryCheckpoint
from plait.checkpoint.room import SideStream
from plait.comm import World
from plait.engine.build import build
from plait.engine.state import snapshots
from plait.engine.state.saves_behind import SavesBehind
from plait.engine.state.saving import lasting_shards_of
from plait.engine.state.snapshots import Snapshots
from plait.launcher.board import Files
from plait.models.losses import cross_entropy
from plait.run.copier import Copier
from tests.accelerator.on_device import is_there, sharing

on_gpu = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
]
STEPS = 4
WIDTHS = {"cpu": 32, "cuda:0": 768}


def optimizer_that_is_late(device: str) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW whose update comes after long work in the device's queue."""
    width = 4096 if device != "cpu" else 64

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-3)
        busy = torch.randn(width, width, device=device)

        def wait(*unused: object) -> None:
            for _ in range(60):
                torch.tanh(busy @ busy)

        made.register_step_pre_hook(wait)
        return made

    return make


Place = tuple[str, int]
"""The name of a tensor, and the first of its numbers that a shard has."""


def read(source: Checkpoint, places: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """What a checkpoint has of these shards."""
    kept = {}
    for (name, start), values in places.items():
        stop = start + values.numel()
        kept[name, start] = source.tensor(name).reshape(-1)[start:stop].clone()
    return kept


def different(kept: Mapping[Place, Tensor], expected: Mapping[Place, Tensor]) -> list[str]:
    """The tensors that are not what was expected, bit for bit."""
    return [
        place[0] for place, values in expected.items() if not torch.equal(kept[place], values.cpu())
    ]


Made = tuple[nn.Module, Tensor]
"""A model and the tokens [batch, sequence + 1] of its steps."""


def made_on_host(device: str) -> Made:
    """Of a size for the device; its values are drawn before ranks that are threads draw any."""
    torch.manual_seed(0)
    width = WIDTHS[device]
    model = models.make(
        "gpt",
        vocab_size=8 * width,
        max_position_embeddings=64,
        hidden_size=width,
        num_attention_heads=width // 16,
        num_hidden_layers=4,
    )
    return model, torch.randint(0, 8 * width, (4, 65))


def _on_disk(folder: Path, rank: int, turn: int) -> Path:
    path = folder / f"{rank}-{turn}"
    path.touch()
    return path


def wrong_copies(
    world: World, device: str, made: Made, folder: Path, in_memory: bool = True
) -> list[str]:
    """What differs in any snapshot or checkpoint of a training whose next step begins at once.

    Files are as a launcher makes them, or on a disk, which no device writes into. A snapshot is
    read when the next has begun, and compared at the end. To read the device before would wait for
    an update, and a copy that comes too early would be right.
    """
    model, tokens = made
    engine = build(
        copy.deepcopy(model).to(device),
        "dp1" if world.size == 1 else "dp2:zero1",
        loss=cross_entropy,
        optimizer=optimizer_that_is_late(device),
        world=world,
    )
    batch = (tokens[:, :-1].to(device), tokens[:, 1:].to(device))
    memory = Files(folder)
    own = [memory.make() if in_memory else _on_disk(folder, world.rank, turn) for turn in (0, 1)]
    files: list[list[Path]] = world.axis("world").gather_objects(own)
    taken = Snapshots(files[world.rank], engine)
    saves = SavesBehind(engine)
    copier = Copier()
    expected: dict[int, dict[Place, Tensor]] = {}
    kept = []
    engine.step(batch, trace=False)
    last = STEPS + 1
    for step in range(2, last + 1):
        shards = lasting_shards_of(engine)
        copier.begin(taken.begin(step, {}))
        engine.copies.add(copier.wait)  # type: ignore[arg-type]
        if step == last:
            save = saves.begin(folder / "saved", {}, lambda: None)
            engine.copies.add(save.wait_for_copy)
        expected[step] = {(one.name, one.start): one.values.clone() for one in shards}
        if step - 1 in expected:  # another file has it
            before = MemoryCheckpoint([own[(step - 1) % 2] for own in files])
            kept.append((step - 1, read(before, expected[step - 1])))
        engine.step(batch, trace=False)  # a trace would wait for the device
    save.wait()
    world.axis("world").barrier()
    newest = (MemoryCheckpoint([own[last % 2] for own in files]), Checkpoint.open(folder / "saved"))
    kept += [(last, read(source, expected[last])) for source in newest]
    found = [name for step, values in kept for name in different(values, expected[step])]
    if device != "cpu" and taken.content(last).is_pinned() != in_memory:
        found.append("a file on a disk is pinned, or one in memory is not")
    copier.close()
    world.axis("world").barrier()
    memory.close()
    return found


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=on_gpu)], ids=["cpu", "gpu"]
)
@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "disk"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_copy_beside_the_next_step_is_the_state_of_its_step(
    device: str, num_ranks: int, in_memory: bool, tmp_path: Path
) -> None:
    given = (device, made_on_host(device), tmp_path, in_memory)
    assert sharing(device)(num_ranks, wrong_copies, *given) == [[]] * num_ranks


@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpu)])
def test_a_refusal_of_the_driver_ends_no_step(_: None) -> None:
    """It refuses to pin the same memory twice, and the next kernels run."""
    device = torch.device("cuda", 0)
    side = SideStream(device)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    unpin = side.pin(memory)
    assert unpin is not None
    assert side.pin(memory) is None
    assert torch.ones(3, device=device).sum().item() == 3
    assert side.pin(torch.zeros(1 << 20, dtype=torch.uint8)) is None  # it is not asked again
    unpin()
    assert not memory.is_pinned()


@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpu)])
def test_a_copy_that_does_not_wait_for_the_update_is_seen(
    _: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Early(SideStream):
        """A stream that waits for the first step alone."""

        def mark(self) -> None:
            if self._ready is None:
                super().mark()

    monkeypatch.setattr(snapshots, "side_stream_of", Early)
    made = made_on_host("cuda:0")
    (found,) = sharing("cuda:0")(1, wrong_copies, "cuda:0", made, tmp_path)
    assert found


@pytest.mark.long
def test_a_trial_of_the_measurement_on_the_cpu() -> None:
    words = ["--device", "cpu", "--plan", "dp1 precision:bf16", "--group", "2", "--turns", "1"]
    command = [sys.executable, "-m", "tests.accelerator.stalls", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a snapshot each step" in done.stdout
