"""The benchmark's table of products, made tiny on whatever processor this is."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpt import Case
from benchmarks.products import end_to_end
from benchmarks.products.bench import main

from plait.cluster.products import CLASSES, RULE, processor_name
from plait.launcher import launch
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


def test_whole_steps_are_compared_round_by_round() -> None:
    seconds = {
        "torch DDP": [1.0, 2.0, 4.0],
        "dp2 as it comes": [1.0, 2.0, 4.0],
        "dp2 torch's product": [2.0, 4.0, 8.0],
    }
    found = end_to_end.row("dp2", seconds)
    cells = [cell.strip() for cell in found.strip("|").split("|")]
    assert cells[:4] == ["`dp2`", "2000.0", "2000.0", "4000.0"]
    assert cells[4:] == [
        "0.500 [0.500, 0.500]",
        "1.000 [1.000, 1.000]",
        "2.000 [2.000, 2.000]",
    ]


@pytest.mark.slow
def test_whole_steps_of_both_products_and_of_ddp_take_turns() -> None:
    case = Case("tiny", "tiny", 2, 128, 8, 4, vocab_size=32)
    work = end_to_end.Work(("dp2", "tp2", "pp2:1f1b mb2"), case, rounds=2)
    seconds = launch(end_to_end.measure, work, RULE, nproc=2)[0]
    assert len(seconds) == 7 and {len(rounds) for rounds in seconds.values()} == {2}
