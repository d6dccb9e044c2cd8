"""Measurements of a busy machine: said, made again, and never kept without a word; and none at all
for a question that has a fault.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.predict.probe import measure, saved
from plait.predict.probe.quiet import ATTEMPTS, Moment, now, quietest, warning
from plait.predict.probe.saved import ensure_probe
from tests.unit.cli.test_auto import PROBE
from tests.unit.cli.test_report import CONFIG


class Machine:
    """Two cores, on which each measurement takes ten seconds of both beside some others."""

    def __init__(self, *others: float) -> None:
        self.others = list(others)
        self.moment = Moment(0.0, 0.0, 0.0, 2)
        self.measured = 0

    def read(self) -> Moment:
        return self.moment

    def measure(self) -> int:
        self.measured += 1
        others = 20.0 * self.others.pop(0)
        past = self.moment
        self.moment = Moment(
            past.clock + 10.0, past.all_work + 12.0 + others, past.own_work + 12.0, 2
        )
        return self.measured


@pytest.mark.parametrize(
    ("others", "chosen", "share", "sentences"),
    [
        ((0.02,), 1, 0.02, []),
        ((0.35, 0.01), 2, 0.01, ["took 35% of the cores meanwhile; measuring again"]),
        (
            (0.35, 0.2),
            2,
            0.2,
            ["measuring again", "took 20% of the cores meanwhile; these figures"],
        ),
        ((0.2, 0.35), 1, 0.2, ["measuring again", "these figures are of a busy machine"]),
    ],
)
def test_a_busy_machine_is_measured_again_and_said(
    others: tuple[float, ...], chosen: int, share: float, sentences: list[str]
) -> None:
    machine = Machine(*others)
    said: list[str] = []
    result, found = quietest(machine.measure, said.append, machine.read)
    assert result == chosen
    assert found == pytest.approx(share)
    assert machine.measured == len(others) <= ATTEMPTS
    assert len(said) == len(sentences)
    assert all(want in line for want, line in zip(sentences, said, strict=True))


def test_a_system_without_counts_is_measured_once() -> None:
    assert quietest(lambda: 7, pytest.fail, lambda: None) == (7, None)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the counts are Linux's")
def test_the_kernels_counts_are_read() -> None:
    first = now()
    sum(range(300_000))
    second = now()
    assert first is not None and second is not None
    assert second.clock > first.clock
    assert second.own_work >= first.own_work
    assert second.num_cores == len(os.sched_getaffinity(0))
    assert 0.0 <= second.others_since(first) <= 1.0


def test_figures_of_a_busy_machine_are_kept_with_their_share_and_said_at_every_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(0.4, 0.3)

    def measured(num_ranks: int, quick: bool, anew: bool) -> dict[str, Any]:
        machine.measure()
        return dict(PROBE)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_measured", measured)
    monkeypatch.setattr(measure, "keeping", lambda num_ranks, disk: {})
    monkeypatch.setattr("plait.predict.probe.quiet.now", machine.read)
    monkeypatch.setattr(quietest, "__defaults__", (machine.read,))
    for _ in range(2):
        ensure_probe()
        assert "while other processes took 30% of its cores" in capsys.readouterr().err
    kept = json.loads((tmp_path / ".cache" / "plait" / "probe.json").read_text())
    assert kept["others_share"] == pytest.approx(0.3)
    assert machine.measured == 2
    assert warning({**kept, "others_share": 0.01}) is None
    assert warning(dict(PROBE)) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate", "--plan", "dp2:zreo3"], "did you mean"),
        (["estimate", "--plan", "tp6:2d"], "square number of ranks"),
        (["estimate", "--plan", "dp64"], "global_batch 8 leaves"),
        (["estimate", "--plan", "dp1", "--framework", "x"], "x"),
        (["estimate", "--plan", "dp1", "--set", "model.hidden_size=15"], "must be a multiple"),
        (["plan", "--set", "model.hidden_size=15"], "must be a multiple"),
        (["plan", "--framework", "x"], "x"),
    ],
)
def test_a_bad_question_measures_nothing(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(saved, "measure_here", lambda *_, **__: pytest.fail("it was measured"))
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    assert main([words[0], str(path), "--cluster", "local", *words[1:]]) == 2
    assert message in capsys.readouterr().err
