"""The config and the plan that a command line means, and what is refused before any rank exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import plait
from plait.cli import common
from plait.cli.compare import loss_error
from plait.cli.parser import Parser, UsageError
from plait.config import Config, load
from plait.errors import ConfigError, NotAvailable, PlanError, ScheduleError, WorldSizeError
from plait.launcher.main_process import is_main_process
from tests.unit.predict.cost import shapes

TABLES = {
    "model": {
        "name": "mlp",
        "in_features": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "out_features": 4,
    },
    "train": {"global_batch": 8, "steps": 5},
    "plan": {"text": "dp2:zero1"},
    "cluster": {"name": "rtx4090x2"},
}


@pytest.fixture
def config() -> Config:
    return load(TABLES)


def test_the_plan_is_the_texts_else_the_configs(config: Config) -> None:
    assert str(common.plan_of(config, None)) == "dp2:zero1"
    assert str(common.plan_of(config, "mb2 dp4", 4)) == "dp4 mb2"


def test_auto_is_a_plan_for_the_ranks_there_are(config: Config) -> None:
    assert common.plan_of(config, "auto").world_size == 2
    assert common.plan_of(config, "auto", 1).world_size == 1


def test_a_schedule_file_is_verified_and_fits_the_plan_before_any_rank_starts(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text(
        "name mine\nmicro-batches 2\nplacement 0 1\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
    )
    tables = {**TABLES, "plan": {"text": "pp2 mb2", "schedule": str(mine)}}
    assert common.plan_of(load(tables), None).pp.size == 2
    assert str(common.plan_of(load(tables), "dp2")) == "dp2"  # it is of no pipeline
    with pytest.raises(ScheduleError, match="of 2 ranks and 2 micro-batches, the plan of 2 and 4"):
        common.plan_of(load(tables), "pp2 mb4")
    mine.write_text("name mine\nmicro-batches 1\nplacement 0 1\n0: 0F0 0B0\n1: 1B0 1F0\n")
    with pytest.raises(ScheduleError, match=">1B0<"):
        common.plan_of(load(tables), "pp2 mb1")
    with pytest.raises(ScheduleError, match=r"nowhere\.txt"):
        common.plan_of(
            load({**tables, "plan": {"text": "pp2 mb1", "schedule": "nowhere.txt"}}), None
        )


@pytest.mark.parametrize(
    ("text", "num_ranks", "error"),
    [
        (None, 3, WorldSizeError),
        ("dp16", None, PlanError),  # a batch of 8
        ("dp2:zero3,replicate3", None, PlanError),
        ("tp2 remat:selective compile", None, NotAvailable),
        ("dp2:", None, PlanError),
    ],
)
def test_a_plan_that_cannot_run_is_refused(
    config: Config, text: str | None, num_ranks: int | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        common.plan_of(config, text, num_ranks)


def test_a_run_has_one_rank_or_more(config: Config) -> None:
    with pytest.raises(UsageError, match="--nproc is 0; it must be 1 or more"):
        common.plan_of(config, None, 0)


def test_a_world_that_has_begun_decides_the_number_of_ranks(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert common.plan_of(config, "dp4").world_size == 4
    assert not is_main_process()
    with pytest.raises(WorldSizeError, match="4 were started"):
        common.plan_of(config, "dp2")


def test_overrides_and_steps_lie_over_the_file(tmp_path: Path, config: Config) -> None:
    (tmp_path / "c.toml").write_text(config.to_toml())
    parser = Parser("plait train", "")
    common.add_config(parser)
    common.add_steps(parser)
    words = [
        str(tmp_path / "c.toml"),
        "--set",
        "train.lr=0.5",
        "train.seed=3",
        "--steps",
        "7",
        "--set",
        "plan.text=dp1",
    ]
    read = common.read_config(parser.parse(words))
    assert (read.train.lr, read.train.seed, read.train.steps, read.plan.text) == (0.5, 3, 7, "dp1")
    assert common.read_config(parser.parse(words), with_steps=False).train.steps == 5
    with pytest.raises(ConfigError, match="steps"):
        common.read_config(parser.parse([*words, "--steps", "0"]))


def test_the_error_of_a_loss_is_relative_to_the_first_row() -> None:
    assert loss_error({"final_loss": 2.0}, {"final_loss": 4.0}) == 0.5
    assert loss_error({"final_loss": 2.0}, {"final_loss": 0.0}) == 2.0
    assert loss_error({"final_loss": None}, {"final_loss": 1.0}) is None


def test_auto_takes_the_recomputation_that_was_chosen_with_it() -> None:
    asked = shapes.config(shapes.LLAMA_8B, 8192, 16)
    tables = {
        **asked,
        "model": {**asked["model"], "max_position_embeddings": 8192},
        "data": {"name": "random", "seq_len": 8192},
        "cluster": {"name": "l40sx8"},
    }
    (first,) = plait.choose(asked, "l40sx8", top=1)
    config, plan = common.planned(load(tables), "auto")
    assert plan == first.plan and plan.remat == "auto"
    assert tuple(config.plan.remat or ()) == first.remat
    own, same = common.planned(load(tables), str(replace(plan, remat="full")))
    assert same.remat == "full" and not own.plan.remat
