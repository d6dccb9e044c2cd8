"""Activations that wait in host memory: equal to one device on a GPU, in less of its memory.

Their streams, events and pinned copies exist there alone. `tests/parity/test_offload.py` has the
rest of the code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.engine import offload
from tests.accelerator.on_device import is_there, sharing
from tests.parity.families import FAMILIES
from tests.parity.harness import TOLERANCE, check, make_engine

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
]
CELLS = [
    *(("dp1", "gpt"), ("dp2:zero3 mb2", "gpt"), ("dp2:zero1 remat:full", "llama")),
    *(("tp2:1d,sp", "split-llama"), ("cp2:ring", "long-llama"), ("dp2 ep2", "mixtral-balanced")),
    *(("pp2:1f1b mb4", "gpt-deep"), ("pp2:zbv mb4", "gpt-deep"), ("dp2:zero1", "resnet")),
]
LARGE = replace(
    FAMILIES["llama"],
    keys={
        **FAMILIES["llama"].keys,
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1536,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    },
    sample=(512,),
    classes=1024,
    num_steps=4,
)


@pytest.mark.parametrize(("plan", "family"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_equal_to_one_device(plan: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All storages of these small models move."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)
    text = f"{plan} precision:float64"
    samples = 8 if "mixtral" in family else 12
    outcome = check(
        sharing("cuda:0"), text, family, samples, device="cuda:0", offload_activations=True
    )
    assert outcome.largest < TOLERANCE, outcome


def large_steps(world: World, plan: str, offloads: bool) -> tuple[list[float], int, float]:
    """Losses of the steps, and of the last ones the peak above what lies there between steps
    [bytes] and the seconds.
    """
    engine = make_engine(world, plan, LARGE, {"offload_activations": offloads})
    losses: list[float] = []
    peak = 0
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index, batch in enumerate(LARGE.batches(8)):
        if index == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            peak = -torch.cuda.memory_allocated()
            began.record()
        losses.append(engine.step(batch, trace=False).loss)
    ended.record()
    torch.cuda.synchronize()
    peak += torch.cuda.max_memory_allocated()
    return losses, peak, began.elapsed_time(ended) / 1e3


@pytest.mark.parametrize("remat", ["", " remat:full"])
def test_losses_to_the_last_bit_in_less_memory(
    remat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve blocks, of which two are there at once. With `remat:full` these are inputs alone, and
    the peak lies elsewhere.
    """
    found: dict[bool, Any] = {}
    for offloads in (False, True, False, True):
        [found[offloads]] = sharing("cuda:0")(
            1, large_steps, f"dp1 precision:float64{remat}", offloads, plan="dp1"
        )
        torch.cuda.empty_cache()
    plain, moved = found[False], found[True]
    with capsys.disabled():
        for name, one in (("kept", plain), ("offloaded", moved)):
            print(f"\n{name}{remat}: {one[1] / 1e6:.0f} MB, {one[2] / 2:.4f} s a step", end="")
    assert moved[0] == plain[0]
    assert moved[1] <= (1.0 if remat else 0.5) * plain[1]
