from __future__ import annotations

import torch

from plait.comm.simulated import simulate
from plait.data.compression import BLOCK, LEVELS, Int8Sum, dequantize, quantize
from plait.mesh import Mesh


def test_rounding_is_at_most_half_a_level() -> None:
    values = torch.randn(3 * BLOCK + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(values)
    assert codes.dtype == torch.int8 and codes.numel() == values.numel() and scales.numel() == 4
    error = (dequantize(codes, scales, values.dtype) - values).abs()
    assert (error <= 0.51 * scales.double().repeat_interleave(BLOCK)[: values.numel()]).all()


def test_zeros_and_extremes() -> None:
    assert not dequantize(*quantize(torch.zeros(5)), torch.float32).any()
    codes, _ = quantize(torch.tensor([-2.0, 2.0, 0.0]))
    assert codes.tolist() == [-LEVELS, LEVELS, 0]


def test_errors_are_fed_back_and_the_running_sum_stays_true() -> None:
    """The sum over many rounds is off by no more than one round's rounding: nothing is lost for good."""

    def live(world) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        axis = world.axis("dp")
        compressed = Int8Sum(axis, 600, torch.float64, torch.device("cpu"))
        generator = torch.Generator().manual_seed(axis.rank)
        true, sent = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
        for _ in range(30):
            flat = torch.randn(600, dtype=torch.float64, generator=generator) * 0.01 + 0.001
            true += flat
            compressed.sum(flat)
            sent += flat
        return true, sent

    results = simulate(Mesh(dp=3), live)
    true = sum(result[0] for result in results)
    assert all(torch.equal(result[1], results[0][1]) for result in results)
    assert (results[0][1] - true).abs().max() < 0.002
