"""A word that is wrong, or does nothing, is said with its cure before any rank exists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.cli import common, main
from plait.config import load
from plait.errors import ConfigError, OptimizerError
from plait.interop import import_file, import_text
from plait.jobs.job import TrainJob
from plait.toml import read_toml

TABLES = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 16,
    },
    "data": {"name": "random", "seq_len": 16},
    "train": {"global_batch": 8, "steps": 5},
}
DEEPSPEED = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}})


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of bad input."""
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("framework", ["nanotron", "torchtitan", "axolotl"])
def test_a_file_of_another_framework_is_refused_and_its_own_is_named(framework: str) -> None:
    with pytest.raises(ConfigError, match=f"one of {framework}; .* say --from deepspeed"):
        import_text(DEEPSPEED, "json", framework)
    assert import_text(DEEPSPEED, "json", "deepspeed").plan.endswith("zero2")


def test_a_file_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"none of its 1 keys .* is it the file that was meant"):
        import_text('{"colour": "red"}', "json", "nanotron")


def test_the_mark_that_editors_put_first_is_no_part_of_a_file(tmp_path: Path) -> None:
    """The byte order mark of UTF-8, which cannot be seen, as Windows' editors write it."""
    config = tmp_path / "run.toml"
    config.write_text("[train]\nsteps = 7\n", encoding="utf-8-sig")
    assert read_toml(config, ConfigError) == {"train": {"steps": 7}}
    other = tmp_path / "deepspeed.json"
    other.write_text(DEEPSPEED, encoding="utf-8-sig")
    assert import_file(other).plan.endswith("zero2")


def test_words_of_no_decay_that_match_nothing_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load(TABLES, ['train.no_decay=["nosuch", "norm"]'])
    common.plan_of(config, "dp2")
    said = capsys.readouterr().err
    assert "train.no_decay 'nosuch' is in no parameter's name" in said
    assert "'norm'" not in said


def test_sentences_of_the_data_of_evaluation_name_them() -> None:
    with pytest.raises(ConfigError) as failure:
        load(TABLES, ["eval.every=1", "eval.data.name=text"])
    said = str(failure.value)
    assert "eval.data.files is missing; data 'text' needs files" in said
    assert "is too small: eval.data 'text' is bytes" in said


def test_an_optimizer_that_takes_other_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_signature.py").write_text("def make(params, lr):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(TABLES, ["train.optimizer=own_signature:make"])
    with pytest.raises(OptimizerError, match=r"make\(params, lr\) .* write def make\(params\)"):
        common.plan_of(config, "dp2")


def test_settings_that_do_nothing_here_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(TABLES, ["plan.shares=[3, 1]", "cluster.interface=nosuch0"])
    common.plan_of(config, "dp1")
    said = capsys.readouterr().err
    assert "plan 'dp1' has one data rank, so plan.shares [3, 1] does nothing" in said
    assert "no network interface 'nosuch0' (cluster.interface)" in said
    common.plan_of(config, "dp2")
    assert "plan.shares" not in capsys.readouterr().err


UNUSED = {
    "train.outer_momentum=0.9": ("dp2", "dp2:local,every2", "has no dp:local axis"),
    "train.compress=int8": ("dp2", "dp2:local,every2", "has no dp:local axis"),
    "train.staleness_rate=inverse": (
        "dp2",
        "dp2:async-server,stale1",
        "has no dp:async-server axis",
    ),
    "train.num_servers=1": ("dp2", "dp2:server", "has no parameter servers"),
    "train.place_experts_every=2": ("dp2", "", "has no expert axis"),
    "plan.counts=[1]": ("dp2", "", "has no pipeline axis"),
    "plan.weight_grad_group=2": ("dp2", "", "has no schedule with a split backward"),
    "plan.remat=['full']": ("dp2", "dp2 remat:auto", "has no remat:auto"),
    "train.min_lr=1e-5": ("dp2", "", "train.schedule is 'constant'"),
}


@pytest.mark.parametrize("key", UNUSED)
def test_a_key_that_the_plan_does_not_read_is_said(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, reads, why = UNUSED[key]
    config = load(TABLES, [key])
    common.plan_of(config, plan)
    said = capsys.readouterr().err
    assert why in said and key.partition("=")[0] in said and "does nothing" in said
    if reads:
        common.plan_of(config, reads)
        assert "does nothing" not in capsys.readouterr().err


def test_settings_of_adamw_under_sgd_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    common.plan_of(load(TABLES, ["train.optimizer=sgd", "train.betas=[0.8, 0.9]"]), "dp2")
    assert "'sgd', so train.betas (0.8, 0.9) does nothing" in capsys.readouterr().err


def test_a_config_of_defaults_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    common.plan_of(load(TABLES), "dp2")
    assert "does nothing" not in capsys.readouterr().err


def test_nesterov_without_sgd_is_named_itself() -> None:
    with pytest.raises(ConfigError, match=r"train\.nesterov belongs to optimizer 'sgd'"):
        load(TABLES, ["train.nesterov=true"])


@pytest.mark.parametrize(
    ("nodes", "ranks", "shape"),
    [
        (1, 1, "1 rank: 1 node with 1 rank"),
        (1, 2, "2 ranks: 1 node with 2 ranks"),
        (2, 1, "2 ranks: 2 nodes with 1 rank each"),
    ],
)
def test_one_node_is_one(nodes: int, ranks: int, shape: str) -> None:
    assert TrainJob("c.toml", "runs/c", nodes, ranks).shape("node") == shape


def test_what_cannot_be_exported_says_what_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["export", "nosuch"], capsys)
    assert "'nosuch' is neither a plan nor the file of a config" in said
    assert "plait export checkpoint RUN_DIR --out DIR" in said
    assert f"plait export checkpoint {tmp_path}" in refused(["export", str(tmp_path)], capsys)
    assert "--to megatron-lm" in refused(["export", "dp2"], capsys)


def test_the_best_weights_of_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["evaluate", "no-such-run", "--best"], capsys)
    assert "no-such-run does not exist; --best needs the folder of a run" in said


@pytest.mark.parametrize(
    "words", [["train"], ["verify"], ["roles"], ["compare", "--plans", "dp1", "dp2", "--"]]
)
def test_a_known_model_where_a_file_is_needed_is_told_how_to_write_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*words, "llama3-8b"], capsys)
    assert "plait config --model llama3-8b > llama3-8b.toml" in said


def test_a_wrong_number_of_devices_is_refused_before_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "measured", lambda name: pytest.fail("measured"))
    said = refused(["plan", "llama3-8b", "--gpus", "-3"], capsys)
    assert said == "plait plan: --gpus is -3; it must be 1 or more\n"


def test_an_unknown_shell_is_told_the_known_ones_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["--completion", "tcsh"], capsys).count("fish") == 1


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("h100x99999999999", "is no number of devices from 1 to 10,000,000"),
        ("wrong.toml", "[device] must be a table of keys, not 3; write [device]"),
        ("list.toml", "[device] must be a table of keys, not [{'preset': 'h100'}]"),
        ("folder", "cluster 'folder': this is a directory; name a TOML file"),
        ("", "--cluster has no name; give a preset and a count such as h100x8"),
    ],
)
def test_what_is_no_cluster_is_told_what_is(
    cluster: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("device = 3")
    (tmp_path / "list.toml").write_text("[[device]]\npreset = 'h100'")
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.toml").write_text(load(TABLES).to_toml())
    assert message in refused(["estimate", "config.toml", "--cluster", cluster], capsys)
    assert message in refused(["explore", "config.toml", "--cluster", cluster], capsys)


@pytest.mark.parametrize("text", ["", ".", "nosuch.txt"])
def test_a_schedule_that_is_no_file_names_its_key(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(load(TABLES).to_toml())
    words = ["train", str(path), "--plan", "pp2", "--set", f"plan.schedule='{text}'"]
    assert f"plan.schedule '{text}' is no file; name a text file" in refused(words, capsys)


def test_folders_without_what_is_needed_are_told_a_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(load(TABLES).to_toml())
    for folder, fault in ((tmp_path, "holds no checkpoint"), (tmp_path / "none", "is no folder")):
        cure = f"{folder} {fault}; name a folder that plait train --out has filled"
        assert cure in refused(["train", str(config), "--resume", str(folder)], capsys)
        words = ["export", "checkpoint", str(folder), "--out", str(tmp_path / "out")]
        assert cure in refused(words, capsys)


def test_no_round_is_named_as_the_option_that_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["federated", str(tmp_path / "small.toml"), "--rounds", "0"]
    assert "--rounds is 0; a federation has one round or more" in refused(words, capsys)
