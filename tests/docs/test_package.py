"""What is packed: plait's own files and nothing else, each kind of them, with one version."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.toml import read_toml
from tests.architecture.source import ROOT

PROJECT = read_toml(ROOT / "pyproject.toml", ValueError)


def files() -> list[str]:
    """The files of the package, below its folder."""
    folder = ROOT / "src" / "plait"
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [
        path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts
    ]


def test_every_file_of_the_package_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["plait"]
    left_out = [
        name
        for name in files()
        if not name.endswith(".py") and not any(fnmatch.fnmatch(name, one) for one in patterns)
    ]
    assert left_out == []


def test_every_folder_of_python_is_a_package() -> None:
    folders = {Path(name).parent for name in files() if name.endswith(".py")}
    assert [
        str(one) for one in folders if f"{(one / '__init__.py').as_posix()}" not in files()
    ] == []


def test_the_version_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"plait {plait.__version__}\n"
    assert plait.__version__ == PROJECT["project"]["version"]
    assert f"## {plait.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_release_is_checked_before_it_is_published() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    steps = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert "python -m build" in steps and "pytest -m quick" in steps and "--version" in steps
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.slow
def test_a_wheel_has_the_package_alone_and_is_small(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 is not installed")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    code = (
        "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=source, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wheel = tmp_path / done.stdout.splitlines()[-1]
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
        metadata = archive.read(next(name for name in packed if name.endswith("/METADATA")))
    assert {name for name in packed if "dist-info" not in name} == {
        f"plait/{one}" for one in files()
    }
    assert wheel.stat().st_size < 2e6
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata.decode(), re.M)
    assert "scikit-learn" not in needed and "torch" in needed
