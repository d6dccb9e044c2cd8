"""A long evaluation says how far it is."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import torch

from plait.datasets.loader import InOrder
from plait.engine.loss import MetricSum
from plait.run.evaluating import WHOLE
from plait.run.evaluation import evaluate
from plait.run.progress import EvaluatedLines


def evaluated(every_seconds: float, remark: str = "") -> list[str]:
    samples: Any = [(torch.zeros(2), torch.tensor(0)) for _ in range(5)]
    engine: Any = SimpleNamespace(
        measure=lambda batch, functions: [MetricSum(6.0, 2.0), MetricSum(1.0, 2.0)]
    )
    stream = io.StringIO()
    tell = EvaluatedLines(5, stream, every_seconds, remark=remark)
    evaluate(engine, InOrder(samples, 2), tell)
    return stream.getvalue().splitlines()


def test_lines_come_by_time() -> None:
    assert evaluated(0.0) == [
        f"evaluated {num} of 5 samples, loss so far 3.0000" for num in (2, 4, 5)
    ]
    assert evaluated(1e9) == []


def test_the_first_line_alone_has_the_remark() -> None:
    first, *others = evaluated(0.0, WHOLE)
    assert first.endswith(f"loss so far 3.0000{WHOLE}") and "--batches N" in WHOLE
    assert all(line.endswith("3.0000") for line in others)
