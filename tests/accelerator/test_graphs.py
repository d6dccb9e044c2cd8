"""Steps as CUDA graphs on a GPU: the bits of steps without, for one rank.

The recorder of `tests/parity/test_graphs.py` stands for CUDA's on processors; here is CUDA's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from plait import comm
from plait.engine import graphs
from plait.engine.build import Options, build
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from tests.accelerator.on_device import is_there
from tests.parity.families import family_of
from tests.parity.test_graphs import STEPS, adamw, batches

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
    pytest.mark.filterwarnings("default"),  # of a compiler of another version
]
CELLS = [
    *(("dp1", "gpt"), ("dp1 mb3", "gpt"), ("dp1 remat:full", "llama"), ("dp1", "resnet")),
    *(("dp1 precision:bf16", "gpt"), ("dp1 mb2 precision:bf16", "llama")),
    *(("dp1 precision:bf16 compile", "gpt"), ("dp1 precision:bf16 compile remat:full", "llama")),
    ("dp1 precision:bf16", "hf-llama"),
]


def steps(plan: str, family: str, *, records: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and norms, the parameters after the steps, and how many a graph has computed."""
    world = comm.init(Mesh(), device="cuda:0")
    try:
        options: dict[str, Any] = {
            "clip_grad_norm": 0.5,
            "learning_rate": lambda step: (step + 1) / STEPS,
        }
        engine = build(
            family_of(family).model(),
            plan,
            loss=cross_entropy,
            optimizer=adamw,
            options=Options(cuda_graphs=records, **options),
            world=world,
        )
        numbers = []
        for index, batch in enumerate(batches(family)):
            result = engine.step(batch)
            numbers += [result.loss, result.grad_norm]
            if index == STEPS // 2:
                numbers.append(engine.evaluate(batches(family)[0]))
        values = {name: value.cpu() for name, value in engine.model.state_dict().items()}
        return numbers, values, 0 if engine.graphs is None else engine.graphs.num_replays
    finally:
        world.close()


@pytest.mark.parametrize(("plan", "family"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_a_graph_has_the_bits_of_a_step(plan: str, family: str) -> None:
    """Kernels are those of the steps without, in one order; the sums of some use atomics."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            numbers, values, replays = steps(plan, family, records=True)
            wanted, plain, _ = steps(plan, family, records=False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert replays == STEPS - graphs.WARM_UP_STEPS
    assert numbers == wanted
    for name, value in plain.items():
        assert torch.equal(values[name], value), name
