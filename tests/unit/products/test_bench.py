"""The benchmark's table of products, made tiny on whatever processor this is."""

from __future__ import annotations

import pytest
import torch
from benchmarks.products.bench import main

from plait.cluster.products import CLASSES, processor_name
from plait.products import operations
from plait.products.measure import shapes_of


@pytest.mark.skipif(not operations(), reason="torch was built without oneDNN")
def test_the_table_has_a_row_a_shape_under_the_processors_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = torch.get_num_threads()
    main(["--rounds", "3", "--classes", "1", "--threads", str(threads)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"processor: {processor_name()}, ")
    rows = [line for line in lines if line.startswith("| forward")]
    assert len(rows) == len(shapes_of(CLASSES[0]))
    for line in rows:
        times = line.split("|")[3:5]
        assert all(int(cell) > 0 for cell in times)
        assert line.endswith(("| torch |", "| oneDNN |"))
