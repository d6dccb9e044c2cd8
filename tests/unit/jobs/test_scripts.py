"""Job scripts: shells read them, YAML parses them, and hostile names stay names."""

from __future__ import annotations

import ast
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from plait.errors import ConfigError
from plait.jobs import TARGETS, TrainJob, script_for

JOB = TrainJob("runs of mine/it's $HOME.toml", None, nodes=2, ranks_per_node=4, plan="dp8:zero3")
CONFIG_TEXT = '[model]\nname = "mlp"\n\n[data]\nname = "random"\n'


def read_by_a_shell(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(text)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["slurm", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_shells_read_the_scripts(target: str, nodes: int, tmp_path: Path) -> None:
    script = script_for(target, replace(JOB, nodes=nodes))
    read_by_a_shell(script.text, tmp_path)
    assert "--resume auto" in script.text
    assert shlex.quote(JOB.config) in script.text


def test_slurm_asks_for_a_warning_and_queues_again() -> None:
    text = script_for("slurm", replace(JOB, deadline_seconds=100)).text
    assert "#SBATCH --signal=USR1@130" in text
    assert "#SBATCH --requeue" in text
    assert "scontrol requeue" in text
    assert "--ntasks-per-node=4" in text


def test_kubernetes_manifests_hold_the_config_and_the_right_numbers(tmp_path: Path) -> None:
    script = script_for("kubernetes", JOB, CONFIG_TEXT)
    config, volume, service, job = yaml.safe_load_all(script.text)
    assert config["data"]["config.toml"] == CONFIG_TEXT
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    read_by_a_shell(container["command"][2], tmp_path)


def test_skypilot_tasks_parse(tmp_path: Path) -> None:
    task = yaml.safe_load(script_for("skypilot", JOB).text)
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    read_by_a_shell(task["run"], tmp_path)


MOUNTS = [("kubernetes", "/runs"), ("skypilot", "/checkpoints")]


@pytest.mark.parametrize(("target", "mount"), MOUNTS)
def test_a_folder_in_the_mounted_one_is_used(target: str, mount: str) -> None:
    assert f"--out {mount}/plait-it-s-home --resume" in script_for(target, JOB).text
    named = replace(JOB, out=f"{mount}/mine/first")
    assert f"--out {mount}/mine/first --resume" in script_for(target, named).text


@pytest.mark.parametrize(("target", "mount"), MOUNTS)
@pytest.mark.parametrize("folder", ["runs/mine", "/elsewhere/mine", "{}", "{}/../mine", "{}2/mine"])
def test_a_folder_that_is_not_kept_is_refused(target: str, mount: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=f"as only {mount} is kept"):
        script_for(target, replace(JOB, out=folder.format(mount)))


def test_ray_scripts_are_python() -> None:
    tree = ast.parse(script_for("ray", JOB).text)
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
    }
    assert values["NODES"] == 2
    assert values["TRAIN"][:2] == ["train", JOB.config]


class Remote:
    """A class as Ray's own, whose objects live in this process."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def options(self, **resources: Any) -> Remote:
        return self

    def remote(self) -> Any:
        machine = self._kind()
        calls = {
            name: SimpleNamespace(remote=getattr(machine, name)) for name in ("address", "train")
        }
        return SimpleNamespace(**calls)


class Lost(Exception):
    """Ray's word for an actor that is gone."""


def stub_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of Ray that the script calls."""
    group = SimpleNamespace(ready=lambda: None)
    placement = SimpleNamespace(
        placement_group=lambda *args, **named: group, remove_placement_group=lambda group: None
    )
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *args: None)
    ray = SimpleNamespace(
        remote=lambda **settings: Remote,
        get=lambda found: found,
        init=lambda: None,
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    parts = {
        "ray": ray,
        "ray.exceptions": SimpleNamespace(RayActorError=Lost),
        "ray.util": ray.util,
        "ray.util.placement_group": placement,
        "ray.util.scheduling_strategies": strategies,
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)


@pytest.mark.parametrize(
    ("starts", "code"),
    [
        ([(1, "step-3"), (0, "step-9")], 0),  # a machine shut down: its ranks saved
        ([(None, "step-3"), (0, "step-9")], 0),  # a machine was lost
        ([(1, "step-3"), (1, "step-3")], 1),  # the second start came no further
        ([(1, "")], 1),  # nothing was ever saved
    ],
)
def test_ray_starts_again_while_there_are_new_checkpoints(
    starts: list[tuple[int | None, str]],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub_ray(monkeypatch)
    folder = tmp_path / "run"
    latest = folder / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    left = iter(starts)
    patience = []

    def start(command: list[str], check: bool, env: dict[str, str]) -> Any:
        patience.append(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        found, saved = next(left)
        if saved:
            latest.write_text(saved)
        if found is None:
            raise Lost("node 2")
        return SimpleNamespace(returncode=found)

    monkeypatch.setattr(subprocess, "run", start)
    path = tmp_path / "job.py"
    path.write_text(script_for("ray", replace(JOB, nodes=1, out=str(folder))).text)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == code
    assert patience == ["70"] * len(starts)
    assert next(left, None) is None


@pytest.mark.parametrize("target", ["torchrun", "kubernetes", "skypilot"])
def test_agents_leave_their_ranks_the_deadline_of_a_save(target: str) -> None:
    text = script_for(target, replace(JOB, deadline_seconds=100)).text
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110\n" in text
    assert "trap 'end 143' TERM" in text


@pytest.mark.parametrize("target", TARGETS)
def test_processors_ask_for_no_gpu(target: str) -> None:
    text = script_for(target, replace(JOB, gpus=False)).text
    assert "gpus-per-node" not in text
    assert "nvidia.com" not in text
    assert "H100" not in text
    assert "NUM_GPUS = 4" not in text


def test_names_are_taken_by_every_queue() -> None:
    assert JOB.name == "plait-it-s-home"
    assert replace(JOB, config="..toml").name == "plait"


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'slurm'"):
        script_for("slrum", JOB)
