from __future__ import annotations

import torch

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.outer.compression import BLOCK, LEVELS, Int8Sum, dequantize, quantize


def test_rounding_is_at_most_half_a_level() -> None:
    values = torch.randn(
        3 * BLOCK + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    codes, scales = quantize(values)
    assert codes.dtype == torch.int8 and codes.numel() == values.numel() and scales.numel() == 4
    error = (dequantize(codes, scales, values.dtype) - values).abs()
    assert (error <= 0.51 * scales.double().repeat_interleave(BLOCK)[: values.numel()]).all()


def test_zeros_and_extremes() -> None:
    assert not dequantize(*quantize(torch.zeros(5)), torch.float32).any()
    codes, _ = quantize(torch.tensor([-2.0, 2.0, 0.0]))
    assert codes.tolist() == [-LEVELS, LEVELS, 0]


def test_errors_are_fed_back_and_the_running_sum_stays_true() -> None:
    """The sum over many rounds is off by no more than one round's rounding: nothing is lost for
    good.
    """

    def live(world) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        axis = world.axis("dp")
        compressed = Int8Sum(axis, 600, torch.float64, torch.device("cpu"))
        generator = torch.Generator().manual_seed(axis.rank)
        true = torch.zeros(600, dtype=torch.float64)
        sent = torch.zeros(600, dtype=torch.float64)
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


def test_nothing_that_was_kept_back_is_lost_when_the_ranks_change() -> None:
    """Two pairs have summed, each for itself, a length that divides by neither 2 nor 4; then all
    four sum together.
    """
    numel = 601

    def live(world) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        pair = world.axis("dp")
        all_four = world.axis("world")
        compressed = Int8Sum(pair, numel, torch.float64, torch.device("cpu"))
        generator = torch.Generator().manual_seed(world.rank)
        own = torch.randn(numel, dtype=torch.float64, generator=generator)
        true = own.clone()
        all_four.all_reduce(true).wait()
        compressed.sum(own)
        told = own / pair.size  # a pair's sum, which both of its ranks have
        all_four.all_reduce(told).wait()
        compressed._axis = all_four
        compressed.regroup()
        return true, told, compressed.flush(), compressed._kept()[:numel]

    for true, told, missing, left in simulate(Mesh(dp=2, tp=2), live):
        assert float(missing.abs().max()) > 1e-4 and not left.any()
        assert torch.allclose(told + missing, true, rtol=0, atol=1e-12)
