"""Every strategy with ranks that share one GPU, against plain PyTorch on that GPU.

Both compute in float64, and the tolerance is that of all parity tests. The CPU runs three plans
too, so that this way of asking is proven where there is no GPU.
"""

from __future__ import annotations

import pytest

from tests.accelerator.on_device import is_there, sharing
from tests.parity.families import family_of
from tests.parity.harness import TOLERANCE, check

DATA = [
    *("dp1", "dp2", "dp3 mb2", "dp4:ring", "dp2:server", "dp2:zero1 mb2", "dp4:zero2 mb2"),
    *("dp2:zero3", "dp4:zero3 remat:full", "dp4:zero3,replicate2", "dp2 remat:selective"),
]
TENSOR = [
    *("tp2", "tp4", "tp2:1d,sp", "tp4:2d", "tp8:2.5d,depth2", "tp8:3d", "tp2 dp2:zero1 mb2"),
    *("tp2:1d,sp dp2:zero3", "tp4:2d dp2:zero2", "tp2:1d,sp remat:selective"),
]
PIPELINES = [
    *("pp2:gpipe mb4", "pp2:1f1b mb4", "pp2:interleaved,v2 mb4", "pp2:zb-h1 mb4", "pp2:zb-h2 mb4"),
    *("pp2:zbv mb4", "pp2:dualpipev mb4", "pp4:1f1b mb4", "pp2:1f1b dp2:zero1 mb4"),
]
CONTEXT = ["cp2:ring", "cp2:ulysses", "cp4:ring", "cp2:ring dp2:zero3", "cp2:ulysses remat:full"]
EXPERTS = ["dp2 ep2", "dp4:zero2 ep2", "dp2 ep2 tp2", "pp2:1f1b dp2 ep2 mb4", "cp2:ring dp2:zero1"]
PRODUCTS = ["pp2:1f1b tp2 dp2:zero1 mb4", "pp2:zbv tp2:1d,sp mb4", "pp2:1f1b tp2 dp2 cp2 mb2"]
CELLS = [
    *((plan, "gpt") for plan in DATA),
    *((plan, "split-llama") for plan in TENSOR),
    *((plan, "gpt-deep") for plan in PIPELINES),
    *((plan, "long-llama") for plan in CONTEXT),
    *((plan, "mixtral-balanced") for plan in EXPERTS),
    *((plan, "split-llama") for plan in PRODUCTS[:2]),
    *((plan, "long-llama") for plan in PRODUCTS[2:]),
    *((plan, "mlp") for plan in ("dp2:zero3", "dp2:server")),
    *((plan, "resnet") for plan in ("dp2:zero1", "pp2:1f1b mb2")),
    *((plan, "hf-llama") for plan in ("dp2:zero3", "tp2", "pp2:1f1b mb2")),
]


def largest_error(device: str, plan: str, family: str) -> float:
    """Of loss, norm, gradients and parameters in three steps with a clipped norm."""
    num_samples = 8 if "mixtral" in family else 12
    text = f"{plan} precision:float64"
    family_of(family).model()  # threads that import one module together can fail
    clip = None if "mixtral" in family else 1.0
    return check(
        sharing(device), text, family, num_samples, clip_grad_norm=clip, device=device
    ).largest


@pytest.mark.accelerator
@pytest.mark.skipif(not is_there(), reason="there is no GPU at hand")
@pytest.mark.parametrize(("plan", "family"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_ranks_that_share_a_gpu_are_equal_to_one_device(plan: str, family: str) -> None:
    assert largest_error("cuda:0", plan, family) < TOLERANCE


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2:1d,sp", "pp2:1f1b mb4"])
def test_the_same_question_asked_on_the_cpu(plan: str) -> None:
    assert largest_error("cpu", plan, "split-llama") < TOLERANCE
