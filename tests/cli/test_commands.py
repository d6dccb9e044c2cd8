"""The verbs as a user meets them: what they print, write and return."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.cluster import Cluster
from plait.predict.cost import estimate
from tests.cli.command import CONFIG, plait, write_config

TRAIN_KEYS = {
    "out",
    "steps",
    "final_loss",
    "tokens_per_second",
    "step_seconds_median",
    "peak_memory",
    "traffic",
    "plan",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run of four steps with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("trained")
    write_config(folder)
    words = (
        "train",
        "tiny.toml",
        "--steps",
        "4",
        "--out",
        "run",
        "--set",
        "train.checkpoint_every=2",
        "--json",
    )
    done = plait(*words, cwd=folder)
    assert done.code == 0, done.err
    return folder, done.json()


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in metrics(run)]


def test_train_says_what_it_did(trained: tuple[Path, dict[str, Any]]) -> None:
    _, result = trained
    assert result.keys() >= TRAIN_KEYS
    assert (result["out"], result["steps"], result["plan"]) == ("run", 4, "dp2:zero1")
    assert len(result["peak_memory"]) == 2
    assert result["traffic"]["dp"] > 0
    assert result["final_loss"] > 0
    assert result["tokens_per_second"] > 0


def test_train_leaves_a_folder_that_says_all(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    run = folder / "run"
    steps = metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    keys = {"step", "loss", "grad_norm", "tokens", "seconds", "lr", "memory"}
    assert all(step.keys() == keys for step in steps)
    assert all(step["tokens"] == 64 for step in steps)
    assert steps[-1]["loss"] == result["final_loss"]
    assert json.loads((run / "summary.json").read_text()) == result
    assert (run / "plan.txt").read_text() == "dp2:zero1\n"
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000004",
    ]


def test_the_trace_has_forward_backward_update_and_collectives_of_every_rank(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    events = json.loads((trained[0] / "run" / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank]
        assert {"F", "B", "U"} <= {event.get("cat") for event in own}
        collectives = [event for event in own if event.get("cat") == "comm" and event["ph"] == "b"]
        assert {"reduce_scatter", "all_gather"} <= {event["args"]["op"] for event in collectives}
        assert any(event["args"]["bytes"] > 0 for event in collectives)


def test_report_draws_what_the_run_has_left(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    done = plait("report", "run", "--out", "page.html", "--json", cwd=folder)
    assert done.code == 0, done.err
    told = done.json()
    assert (told["out"], told["plan"], told["traced_steps"]) == (
        "page.html",
        result["plan"],
        [1, 2, 3, 4],
    )
    assert 0 < told["simulated_step_seconds"] <= told["measured_step_seconds"] * 2
    page = (folder / "page.html").read_text()
    assert "measured: step" in page and "rank 1" in page and "dp, counted" in page


def test_the_stored_config_trains_the_same(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = trained
    done = plait(
        "train", folder / "run" / "config.toml", "--plan", "dp1", "--out", "again", cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert losses(tmp_path / "again") == pytest.approx(losses(folder / "run"), rel=1e-6)


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3,offload", "dp2:ring"])
def test_a_run_is_resumed_under_another_plan(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, plan: str
) -> None:
    folder, _ = trained
    words = ("train", folder / "run" / "config.toml", "--plan", plan, "--out", "run", "--json")
    done = plait(*words, "--resume", folder / "run" / "checkpoints" / "step-00000002", cwd=tmp_path)
    assert done.code == 0, done.err
    assert ("host memory already" in done.err) == ("offload" in plan), done.err
    assert [step["step"] for step in metrics(tmp_path / "run")] == [3, 4]
    assert losses(tmp_path / "run") == pytest.approx(losses(folder / "run")[2:], rel=1e-6)
    assert (done.json()["steps"], done.json()["steps_here"]) == (4, 2)


def test_a_command_that_is_repeated_after_the_last_step_says_its_numbers_again(
    tmp_path: Path,
) -> None:
    write_config(tmp_path)
    words = ("train", "tiny.toml", "--plan", "dp1", "--out", "run", "--resume", "auto", "--json")
    first, again = (plait(*words, cwd=tmp_path) for _ in range(2))
    assert (first.code, again.code) == (0, 0), again.err
    assert again.json()["steps_here"] == 0
    for key in ("first_loss", "final_loss", "tokens_per_second", "step_seconds_median", "traffic"):
        assert again.json()[key] == first.json()[key]
    other = plait(*words, "--plan", "dp2", cwd=tmp_path)
    assert other.json()["step_seconds_median"] is None  # no step ran under this plan


def test_without_a_folder_a_run_goes_where_its_name_says_and_is_resumed_from_there(
    tmp_path: Path,
) -> None:
    write_config(tmp_path)
    first = plait("train", "tiny.toml", "--plan", "dp1", "--steps", "2", cwd=tmp_path)
    assert first.code == 0, first.err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-")
    second = plait("train", "tiny.toml", "--plan", "dp1", "--steps", "3", "--resume", cwd=tmp_path)
    assert second.code == 0, second.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    assert [step["step"] for step in metrics(run)] == [1, 2, 3]
    assert "final loss" in second.out
    assert "step 3/3" in second.err


def test_what_ranks_print_does_not_spoil_the_one_object(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "print('imported')\n"
        "def model():\n"
        "    os.write(1, b'made by native code')\n"
        "    return torch.nn.Linear(8, 4)\n"
        "def data():\n"
        "    return torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))\n"
    )
    sections = CONFIG.partition("[train]")
    write_config(
        tmp_path,
        '[model]\npython = "mine:model"\n[data]\npython = "mine:data"\n[train]' + sections[2],
    )
    done = plait("train", "tiny.toml", "--steps", "1", "--out", "run", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json()["steps"] == 1
    assert "made by native code" in done.err


def test_compare_has_a_row_a_plan_with_the_error_against_the_first(tmp_path: Path) -> None:
    write_config(tmp_path)
    plans = ["dp1", "dp2:zero3", "dp2:server mb2"]
    done = plait("compare", "tiny.toml", "--plans", *plans, "--steps", "2", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = done.json()["rows"]
    assert [row["plan"] for row in rows] == plans
    assert all(row.keys() >= TRAIN_KEYS | {"loss_error"} for row in rows)
    assert rows[0]["loss_error"] == 0
    assert all(row["loss_error"] < 1e-5 for row in rows)
    assert rows[0]["traffic"] == {}
    assert not (tmp_path / "runs").exists()


def test_an_asynchronous_run_says_how_stale_its_gradients_were(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = (
        "train",
        "tiny.toml",
        "--plan",
        "dp2:async-server,stale3",
        "--steps",
        "6",
        "--out",
        "run",
        "--json",
    )
    done = plait(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    ages = done.json()["staleness"]
    assert sum(ages.values()) == 2 * 2 * 6 and all(
        0 <= int(age) <= 3 for age in ages
    )  # servers x workers x steps
    assert all(step["staleness"] >= 0 for step in metrics(tmp_path / "run"))


def test_verify_says_yes(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = plait(
        "verify", "tiny.toml", "--plan", "dp2:zero2", "--steps", "1", "--json", cwd=tmp_path
    )
    assert done.code == 0, done.err
    result = done.json()
    assert result["ok"] is True
    assert result.keys() >= {
        "loss_error",
        "grad_error",
        "param_error",
        "worst",
        "plan",
        "world_size",
        "steps",
    }


def test_verify_says_no_with_exit_code_1(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = (
        "verify",
        "tiny.toml",
        "--plan",
        "dp2:zero2",
        "--steps",
        "1",
        "--dtype",
        "float32",
        "--tolerance",
        "1e-30",
    )
    done = plait(*words, "--json", cwd=tmp_path)
    assert done.code == 1, done.err
    assert done.json()["ok"] is False


@pytest.mark.slow
def test_verify_walks_a_cover_until_its_time_is_used_up(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = ("verify", "tiny.toml", "--all", "--steps", "1", "--budget", "0.1", "--json")
    done = plait(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.json()
    assert result["ok"] is True
    assert [row["plan"] for row in result["rows"]] == ["dp2:zero1 precision:float64"]
    assert "probe adamw" in result["rows"][0]["paths_not_walked"]
    assert {"dp2 mb2", "tp2:1d,sp", "pp2", "cp2"} <= set(result["plans_not_walked"])
    assert result["plans_walked"] == 1
    assert "predicted from one step" in done.err


@pytest.mark.slow
def test_a_cover_of_which_only_one_device_was_walked_says_so(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = ("verify", "tiny.toml", "--all", "--steps", "1", "--budget", "0.1")
    done = plait(*words, "--set", "plan.text=dp1", cwd=tmp_path)
    assert done.code == 0, done.err
    last = done.out.splitlines()[-1]
    assert last.startswith("1 of ") and "no plan on several ranks is proven" in last
    assert "give --budget more" in last


@pytest.mark.slow
def test_verify_goes_on_after_a_resume_under_the_plan_of_the_config(tmp_path: Path) -> None:
    write_config(tmp_path)
    words = ("verify", "tiny.toml", "--steps", "2", "--steps-after-resume", "1", "--json")
    done = plait(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.json()
    names = [probe["name"] for probe in result["probes"]]
    assert names[-2:] == [
        "resume under dp2:zero1 precision:float64",
        "resume under precision:float64",
    ]
    assert all(probe["seconds"] > 0 for probe in result["probes"])
    assert "probe adamw (2 of 12" in done.err


@pytest.mark.slow
def test_verify_checks_the_step_that_the_documentation_shows(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "verify.md"
    block = page.read_text().split("```python\n")[1].split("```")[0]
    wrong = (
        "\n\ndef wrong(state, batch, loss):\n    train_step((state[0].module, state[1]), batch, "
        "loss)\n"
    )
    (tmp_path / "steps.py").write_text(block + wrong)
    done = plait("verify", "--step", "steps.py", "--nproc", "2", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json()["ok"] is True and done.json()["paths_not_walked"] == []
    done = plait("verify", "--step", "steps.py:wrong", "--json", cwd=tmp_path)
    assert done.code == 1, done.err
    assert done.json()["findings"][0]["cause"] == "missing-reduction"
    done = plait("verify", "--step", "steps.py:worng", "--json", cwd=tmp_path)
    assert (done.code, done.json()["kind"]) == (2, "ConfigError")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nproc", "2"), "belongs to --step"),
        (("--step", "steps.py"), "leave CONFIG out"),
        (("--budget", "-1"), "a number of seconds above 0"),
        (("--tolerance", "-1"), "a number above 0 is needed"),
        (("--tolerance", "nan"), "a number above 0 is needed"),
        (("--steps-after-resume", "-1"), "0 or more"),
        (("--steps", "0"), "--steps 0: at least one step"),
        (("--resume-plan", "dp1"), "needs --steps-after-resume"),
        (("--all", "--plan", "dp1"), "not allowed with"),
    ],
)
def test_verify_refuses_options_that_mean_nothing(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    from plait.cli.parser import Parser, UsageError
    from plait.cli.verify import add_arguments, run

    write_config(tmp_path)
    parser = Parser("plait verify", "")
    add_arguments(parser)
    with pytest.raises(UsageError, match=sentence):
        run(parser.parse([str(tmp_path / "tiny.toml"), *words]))


def test_probe_measures_and_plans_can_be_estimated_on_it(tmp_path: Path) -> None:
    done = plait("probe", "--quick", "--out", "probe.json", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    probe = done.json()
    assert probe["peak_flops"]["float32"] > 1e8
    assert json.loads((tmp_path / "probe.json").read_text()) == {
        key: value for key, value in probe.items() if key != "out"
    }
    gpt = {
        "name": "gpt",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    for plan in ("dp1", "dp2", "tp4:2d"):  # also of more ranks than were measured
        assert (
            estimate(
                {"model": gpt, "data": {"seq_len": 32}}, plan, Cluster.local(probe)
            ).step_seconds
            > 0
        )


def test_torchruns_world_is_joined(tmp_path: Path) -> None:
    write_config(tmp_path)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "plait",
    )
    done = plait(
        "train",
        "tiny.toml",
        "--steps",
        "2",
        "--out",
        "run",
        "--json",
        cwd=tmp_path,
        python=torchrun,
    )
    assert done.code == 0, done.err
    assert done.json()["plan"] == "dp2:zero1"
    assert len(metrics(tmp_path / "run")) == 2
