"""Job scripts as the tools themselves read them, each where it is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from plait.jobs import script_for
from tests.unit.jobs.test_scripts import CONFIG_TEXT, JOB

pytestmark = pytest.mark.filterwarnings("ignore")  # what the tools say of their own


@pytest.mark.parametrize("gpus", [True, False])
def test_kubernetes_manifests_fit_the_schema_of_its_api(gpus: bool) -> None:
    tool = pytest.importorskip("kubernetes_validate")
    manifests = yaml.safe_load_all(
        script_for("kubernetes", replace(JOB, gpus=gpus), CONFIG_TEXT).text
    )
    for manifest in manifests:
        tool.validate(manifest, tool.latest_version(), strict=True)
        broken = {**manifest, "spek": {}}
        with pytest.raises(tool.ValidationError):
            tool.validate(broken, tool.latest_version(), strict=True)


@pytest.mark.parametrize("gpus", [True, False])
def test_skypilot_reads_the_task(
    gpus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sky = pytest.importorskip("sky")
    path = tmp_path / "task.yaml"
    path.write_text(script_for("skypilot", replace(JOB, gpus=gpus)).text)
    task = sky.Task.from_yaml(str(path))
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.job_recovery["recover_on_exit_codes"] == [143, 138]
    path.write_text(path.read_text().replace("num_nodes:", "num_nodez:"))
    with pytest.raises(ValueError, match="num_nodez"):
        sky.Task.from_yaml(str(path))
