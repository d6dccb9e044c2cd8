"""The bar that the estimator must stay under, over every complete published run that the repository carries."""

import pytest
from benchmarks.planner.ptdp import COLUMNS, PUBLISHED, predict
from benchmarks.planner.rows import cases
from benchmarks.planner.validate import error, run, summary


@pytest.fixture(scope="module")
def pairs():
    kept, _ = cases()
    asked, refused = run(kept)
    assert not refused
    return asked


def by_source(pairs, published, predicted):
    out = {}
    for case, estimate in pairs:
        if published(case):
            out.setdefault(case.source, []).append(error(predicted(estimate), published(case)))
    return out


def test_step_time(pairs):
    errors = by_source(pairs, lambda case: case.seconds, lambda estimate: estimate.step_seconds)
    everything = [value for values in errors.values() for value in values]
    assert len(everything) >= 640
    assert summary(everything)["median"] <= 0.08
    worst = {source: summary(values)["median"] for source, values in errors.items()}
    assert max(worst.values()) <= 0.15, worst


def test_peak_memory(pairs):
    errors = by_source(pairs, lambda case: case.peak_bytes, lambda estimate: estimate.memory.total)
    assert summary([value for values in errors.values() for value in values])["median"] <= 0.10


def test_every_model_of_the_ptdp_table():
    for values in PUBLISHED:
        row = dict(zip(COLUMNS, values, strict=True))
        assert predict(row) == pytest.approx(row["tflops"], rel=0.10)
