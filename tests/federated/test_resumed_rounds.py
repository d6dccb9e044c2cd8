"""A simulation that was interrupted goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.cli import main
from plait.config import Config
from plait.errors import CheckpointError
from plait.outer.federated.rounds import Round
from plait.outer.federated.server_state import state_path
from plait.outer.federated.simulation import simulate
from tests.federated.test_simulation import config


def interrupt(done: Round) -> None:
    if done.number == 2:
        raise KeyboardInterrupt


def ignore(done: Round) -> None:
    """Let the simulation go on."""


def interrupted(settings: Config, weights: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(settings, interrupt, weights=weights)


def assert_alike(one: Path, other: Path) -> None:
    """The same weights, and the same state after them."""
    for left, right in ((one, other), (state_path(one), state_path(other))):
        expected = load_file(left)
        found = load_file(right)
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize(
    "overrides",
    [
        ["federated.strategy=fedavg", "train.optimizer=adamw", "train.lr=0.01"],
        ["federated.strategy=fedavg", "train.schedule=cosine", "federated.fraction=0.5"],
        ["federated.strategy=fedavg", "train.float16=true"],
        ["federated.strategy=fedavgm"],
        ["federated.strategy=fedadam", "federated.server_lr=0.1"],
        ["federated.strategy=scaffold", "federated.fraction=0.5"],
        ["federated.strategy=scaffold", "federated.workers=2", "federated.rounds=3"],
    ],
)
def test_resumed_rounds_are_those_of_one_simulation(tmp_path: Path, overrides: list[str]) -> None:
    settings = config("federated.rounds=4", *overrides, plan="dp1")
    whole = simulate(settings, ignore, weights=tmp_path / "whole")
    weights = tmp_path / "parts"
    interrupted(settings, weights)
    seen: list[Round] = []
    out = tmp_path / "rounds.json"
    result = simulate(settings, seen.append, out=out, weights=weights, resume=True)
    assert [done.number for done in seen] == [3, 4][: settings.federated.rounds - 2]
    assert result == whole
    assert_alike(tmp_path / "whole", weights)


def test_a_simulation_gets_more_rounds(tmp_path: Path) -> None:
    """The files are complete too where nothing was left to do."""
    weights = tmp_path / "weights"
    simulate(config("federated.rounds=2"), ignore, weights=weights)
    more = config("federated.rounds=3")
    spread = config("federated.rounds=3", "federated.workers=2")
    result = simulate(spread, ignore, weights=weights, resume=True)
    assert result == simulate(more, ignore, weights=tmp_path / "whole")
    assert_alike(tmp_path / "whole", weights)
    weights.unlink()
    simulate(more, ignore, weights=weights, resume=True)
    assert_alike(tmp_path / "whole", weights)


def test_secret_sums_go_on_too(tmp_path: Path) -> None:
    """Messages hold new keys, and so differ in their bytes alone."""
    settings = config("federated.rounds=3", "federated.secure=true", plan="dp1")
    simulate(settings, ignore, weights=tmp_path / "whole")
    interrupted(settings, tmp_path / "parts")
    simulate(settings, ignore, weights=tmp_path / "parts", resume=True)
    assert_alike(tmp_path / "whole", tmp_path / "parts")


def test_a_private_simulation_counts_all_its_rounds(tmp_path: Path) -> None:
    settings = config("federated.rounds=3", "federated.clip=0.5", "federated.noise=1.0", plan="dp1")
    interrupted(settings, tmp_path / "weights")
    result = simulate(settings, ignore, weights=tmp_path / "weights", resume=True)
    whole = simulate(settings, ignore)
    assert result["epsilon"] == whole["epsilon"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=0.1", "federated.mu=1.0"], "another federated.mu, train.lr; resume with"),
        (["federated.rounds=1"], "has done 2 rounds, and federated.rounds is 1; ask for 2 or more"),
        (["model.hidden_size=8"], "another model.hidden_size; resume with"),
    ],
)
def test_a_state_of_another_config_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    weights = tmp_path / "weights"
    interrupted(config("federated.rounds=3", plan="dp1"), weights)
    with pytest.raises(CheckpointError, match=message):
        simulate(config(*overrides, plan="dp1"), ignore, weights=weights, resume=True)


def test_a_schedule_over_the_rounds_keeps_their_number(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    schedule = "train.schedule=linear"
    interrupted(config("federated.rounds=3", schedule, plan="dp1"), weights)
    with pytest.raises(CheckpointError, match=r"another federated\.rounds; resume with"):
        simulate(
            config("federated.rounds=4", schedule, plan="dp1"), ignore, weights=weights, resume=True
        )


def asked(tmp_path: Path, *words: str) -> int:
    settings = tmp_path / "config.toml"
    settings.write_text(config(plan="dp1").to_toml())
    return main(["federated", str(settings), "--resume", *words])


def test_a_state_that_is_missing_or_damaged_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    words = ("--weights", str(weights))
    assert asked(tmp_path, *words) == 2
    assert f"there is no {state_path(weights)} to resume from" in capsys.readouterr().err
    interrupted(config("federated.rounds=3", plan="dp1"), weights)
    state = state_path(weights)
    whole = state.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for content in (b"", whole[:-9], whole[:100], weights.read_bytes(), flipped):
        state.write_bytes(content)
        assert asked(tmp_path, *words) == 2
        said = capsys.readouterr().err
        assert f"{state} is damaged, or no state of a federation" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("words", [(), ("--weights", "w", "--deploy", "d")])
def test_resuming_needs_the_file_of_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert asked(tmp_path, *words) == 2
    assert "give that FILE, without --deploy and --serve" in capsys.readouterr().err
