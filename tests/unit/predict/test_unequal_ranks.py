"""What the parts of unequal ranks reach at best, as `benchmarks.unequal` prints it, by hand."""

from __future__ import annotations

import pytest
from benchmarks.unequal.bench import Measure, StageWork, at_best, best_counts

MEASURE = Measure(steps=1, batch=64, layers=16)
RATES = (3.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "fraction"), [((32, 32), 0.5), ((48, 16), 1.0), ((47, 17), 64 / 17 / 4)]
)
def test_shares_of_samples(parts: tuple[int, int], fraction: float) -> None:
    work = [part / sum(parts) for part in parts]
    assert at_best("dp2", MEASURE, RATES, work) / sum(RATES) == pytest.approx(fraction)


@pytest.mark.parametrize("micro_batches", [4, 16, 64])
@pytest.mark.parametrize("layers", [(12, 4), (13, 3), (8, 8)])
def test_stages_of_whole_layers(layers: tuple[int, int], micro_batches: int) -> None:
    layer, head = 24.0, 5.0
    work = [layers[0] * layer, layers[1] * layer + head]
    fast, slow = (64 * one / sum(work) / speed for one, speed in zip(work, RATES, strict=True))
    step = max(fast, slow) + min(fast, slow) / micro_batches
    parts = StageWork(layer, 0.0, head).parts(layers)
    found = at_best(f"pp2 mb{micro_batches}", MEASURE, RATES, parts)
    assert found == pytest.approx(64 / step)
    assert found / sum(RATES) < micro_batches / (micro_batches + 1)


@pytest.mark.parametrize(("head", "counts"), [(0.0, (12, 4)), (24.0, (13, 3)), (48.0, (14, 2))])
def test_layers_are_dealt_with_the_head_in_sight(head: float, counts: tuple[int, int]) -> None:
    work = StageWork(layer=24.0, first=0.0, last=head)
    assert best_counts("pp2 mb64", MEASURE, RATES, work) == counts
