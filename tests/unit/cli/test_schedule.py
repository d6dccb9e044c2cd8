"""`plait schedule`: the keys of its JSON, its files, its errors; and it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli import main
from plait.parallel.pipeline.schedules import SCHEDULES


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["schedule", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("name", SCHEDULES)
def test_keys_of_every_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, name, "--stages", "4", "--microbatches", "8")
    assert len(data["grid"]) == 4  # type: ignore[arg-type]
    for key in ("peak_activations", "weight_versions", "staleness"):
        assert len(data[key]) == data["stages"]  # type: ignore[arg-type]
    assert 0 <= data["bubble_fraction"] < 1  # type: ignore[operator]


def test_numbers_of_the_classics(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--stages", "4", "--microbatches", "8")
    assert answer(capsys, "gpipe", *shape)["peak_activations"] == [8, 8, 8, 8]
    assert answer(capsys, "1f1b", *shape)["bubble_fraction"] == pytest.approx(3 / 11)
    assert answer(capsys, "pipedream", *shape)["weight_versions"] == [4, 3, 2, 1]
    assert answer(capsys, "2bw", *shape)["weight_versions"] == [2, 2, 2, 2]
    assert answer(capsys, "interleaved,v3", *shape)["stages"] == 12
    assert answer(capsys, "interleaved", "--virtual", "3", *shape)["stages"] == 12


def test_the_terminal_shows_the_grid_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "zbv", "--stages", "2", "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert "0F0" in out
    assert "bubble" in out
    assert "of a rank's whole share" in out


def test_svg_and_text_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.svg"
    mine = tmp_path / "mine.txt"
    answer(capsys, "1f1b", "--svg", str(picture))
    assert picture.read_text().startswith("<svg")
    mine.write_text("name mine\nmicro-batches 1\nplacement 0 1\n0: 0F0 0B0\n1: 1F0 1B0\n")
    assert answer(capsys, str(mine))["ranks"] == 2
    mine.write_text("name mine\nmicro-batches 1\nplacement 0 1\n0: 0F0 0B0\n1: 1B0 1F0\n")
    assert main(["schedule", str(mine)]) == 2
    assert ">1B0<" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1fb1"], "did you mean '1f1b'"),
        (["interleaved,vx"], "say interleaved,v2"),
        (["2bw", "--stages", "4", "--microbatches", "2"], "needs at least 4"),
        (["1f1b", "--stages", "0"], "0 ranks"),
        (["1f1b", "--svg", "/nowhere/at/all.svg"], "cannot write"),
    ],
)
def test_bad_input_is_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == 2
    assert message in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from plait.cli import main; main(['schedule', '1f1b', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_the_page_of_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    words = ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--html", str(page)]
    assert main(words) == 0
    text = page.read_text()
    lead = "1f1b on 4 ranks with 8 micro-batches: a rank stands idle for 27.3% of a step, and the"
    assert f'<p class="lead">{lead}' in text
    assert "zb-h2 would leave a rank idle for 0.0% of a step instead." in text
    assert "With 16 micro-batches a step, 1f1b would leave it idle for 15.8%." in text
    assert '"0F0, micro-batch 0, 1 from 0 on"' in text and "default-src" in text
    assert main([*words[:-1], str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["schedule", "pipedream", "--html", str(page)]) == 0
    assert "never drains" in page.read_text()
