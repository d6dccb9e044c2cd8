"""What takes long says so, and what does not is silent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import explain, roles
from plait.cli.entry import main
from plait.launcher import patience
from plait.launcher.patience import telling

MODEL = """
[model]
name = "gpt"
num_hidden_layers = 1
hidden_size = 8
num_attention_heads = 2
vocab_size = 16
[data]
name = "random"
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(patience, "AGAIN_SECONDS", 0.01)


def awaited(capsys: pytest.CaptureFixture[str], is_there: Callable[[str], bool]) -> str:
    """What stderr has once it is there."""
    text = ""
    while not is_there(text):
        time.sleep(0.005)
        text += capsys.readouterr().err
    return text


@pytest.mark.usefixtures("impatient")
def test_each_thing_that_is_done_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("explain", "loading torch") as now:
        first = awaited(capsys, lambda text: text.count("s so far)\n") >= 2)
        assert set(first.splitlines()) == {"plait explain: loading torch (0 s so far)"}
        now("running it")
        awaited(capsys, lambda text: "plait explain: running it (" in text)


def test_what_is_quick_or_fails_says_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), telling("explain", "loading torch"):
        raise ValueError("x")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("impatient")
def test_explain_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line comes while the case runs, and names the term and its ranks."""
    said = []

    def slow(term: str) -> str:
        said.append(awaited(capsys, lambda text: "running" in text))
        return term

    monkeypatch.setattr("plait.explain.explanation.explain", slow)
    assert explain.explained("tp8:3d") == "tp8:3d"
    assert "running the small case of 'tp8:3d' on 8 ranks (" in said[0]


@pytest.mark.usefixtures("impatient")
def test_roles_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model of many layers takes most of a minute."""
    said = []

    def slow(*_: object) -> dict[str, float]:
        said.append(awaited(capsys, lambda text: "counting" in text))
        return {"parameters": 2, "parameters_per_rank": 1}

    monkeypatch.setattr(roles, "_cost", slow)
    config = tmp_path / "run.toml"
    config.write_text(MODEL)
    assert main(["roles", str(config)]) == 0
    assert "plait roles: counting the parameters of one of 2 ranks (" in said[0]


def test_a_bad_term_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom plait.cli import main\nassert main(['explain', 'dp4:zreo3']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "did you mean 'zero3'?" in done.stderr
