"""Known models by name: their configs load, and `plan` answers them as it answers a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.config import load
from plait.errors import ConfigError
from plait.explore.known import starting_config
from plait.predict.cost.model.known import KNOWN
from plait.predict.cost.model.tables import config_tables, read_config

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", KNOWN)
def test_a_starting_config_is_valid_and_has_the_models_sizes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(starting_config(name), encoding="utf-8")
    tables = config_tables(path)
    assert tables["model"] == {"name": "hf", "config": KNOWN[name].model}
    config = load(path)
    assert config.data.seq_len == KNOWN[name].seq_len and config.plan.text == "auto"


def test_plan_takes_a_name_and_a_file_of_that_name_comes_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(name: str) -> list[str]:
        assert main(["plan", name, "--cluster", "h100x8", "--top", "1", "--json"]) == 0
        return [one["plan"] for one in json.loads(capsys.readouterr().out)["plans"]]

    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN["gpt2"].model))
    by_file = asked(str(path))
    assert asked("gpt2") == by_file
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text("no TOML")
    assert main(["plan", "gpt2", "--cluster", "h100x8"]) == 2


def test_a_wrong_name_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for ask in (config_tables, starting_config):
        with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
            ask("llama3-8")
    assert main(["config", "--model", "gpt2"]) == 0
    assert capsys.readouterr().out.rstrip() == starting_config("gpt2").rstrip()


def test_python_takes_the_names_that_verbs_take() -> None:
    by_tables = plait.estimate(KNOWN["llama3-8b"].tables, "dp8", "h100x8")
    assert plait.estimate("Llama3-8b", "dp8", "h100x8") == by_tables
    assert plait.choose("gpt2", "h100x8", top=1) == plait.search("gpt2", "h100x8", top=1).plans


def test_a_name_that_no_file_can_have_is_refused_in_words() -> None:
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="neither a file nor a known model"):
            read_config(name)
