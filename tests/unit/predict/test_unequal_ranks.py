"""What the parts of unequal ranks reach at best, as `benchmarks.unequal` prints it, by hand."""

from __future__ import annotations

import pytest
from benchmarks.unequal.bench import Measure, at_best

MEASURE = Measure(steps=1, batch=64, layers=16, cycle=0.01, processor=False)
RATES = (3.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "fraction"), [((), 0.5), ((48, 16), 1.0), ((47, 17), 64 / 17 / 4), ((3, 1), 1.0)]
)
def test_shares_of_samples(parts: tuple[int, ...], fraction: float) -> None:
    assert at_best("dp2", MEASURE, RATES, parts) / sum(RATES) == pytest.approx(fraction)


@pytest.mark.parametrize("micro_batches", [4, 16, 64])
@pytest.mark.parametrize("layers", [(12, 4), (13, 3), (8, 8)])
def test_stages_of_whole_layers(layers: tuple[int, int], micro_batches: int) -> None:
    layer, head = 2 * 12 * 256**2 + 4 * 128 / 2 * 256 * 2, 2 * 256**2
    work = [layers[0] * layer, layers[1] * layer + head]
    fast, slow = (64 * one / sum(work) / speed for one, speed in zip(work, RATES, strict=True))
    step = max(fast, slow) + min(fast, slow) / micro_batches
    found = at_best(f"pp2 mb{micro_batches}", MEASURE, RATES, layers)
    assert found == pytest.approx(64 / step)
    assert found / sum(RATES) < micro_batches / (micro_batches + 1)
