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
    assert steps.index("python .github/addresses.py") < steps.index("python -m build")
    assert "pytest -m quick" in steps and "--version" in steps
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


def copy_of_sources(folder: Path) -> Path:
    """What a wheel is built from, in a folder of its own."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    return source


def build_wheel(source: Path, target: Path) -> Path:
    """A wheel, built in a process of its own."""
    code = (
        "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=source, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def read_wheel(wheel: Path) -> tuple[list[str], str]:
    """The names of its files, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
        metadata = archive.read(next(name for name in packed if name.endswith("/METADATA")))
    return packed, metadata.decode()


@pytest.mark.slow
def test_a_wheel_has_the_package_alone_and_is_small(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 is not installed")
    wheel = build_wheel(copy_of_sources(tmp_path), tmp_path)
    packed, metadata = read_wheel(wheel)
    assert {name for name in packed if "dist-info" not in name} == {
        f"plait/{one}" for one in files()
    }
    assert wheel.stat().st_size < 2e6
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.M)
    assert "scikit-learn" not in needed and "torch" in needed


FORGE = {
    "GITHUB_SERVER_URL": "https://forge.example",
    "GITHUB_REPOSITORY": "people/plait",
    "GITHUB_REF_NAME": "v9.8.7",
}


def write_addresses(folder: Path, forge: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script of the release in a folder."""
    return subprocess.run(
        [sys.executable, str(ROOT / ".github" / "addresses.py")],
        cwd=folder, env=forge, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.slow
def test_a_release_has_the_addresses_of_its_forge(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 is not installed")
    source = copy_of_sources(tmp_path)
    done = write_addresses(source, FORGE)
    assert done.returncode == 0, done.stderr
    _, metadata = read_wheel(build_wheel(source, tmp_path))
    home = "https://forge.example/people/plait"
    urls = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", metadata, re.M))
    assert urls["Homepage"] == urls["Source"] == home
    assert urls["Changelog"] == f"{home}/blob/v9.8.7/CHANGELOG.md"
    assert urls["Issues"] == f"{home}/issues"
    assert f"]({home}/raw/v9.8.7/docs/pictures/explore-light.png)" in metadata
    assert f"]({home}/blob/v9.8.7/docs/start.md)" in metadata
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", metadata) == []


def test_a_release_without_a_forge_is_refused(tmp_path: Path) -> None:
    done = write_addresses(tmp_path, {"GITHUB_SERVER_URL": "https://forge.example"})
    assert done.returncode == 2
    assert done.stderr == "not set: GITHUB_REPOSITORY, GITHUB_REF_NAME\n"


def test_every_address_of_a_release_is_a_file() -> None:
    assert (ROOT / "docs" / "README.md").is_file() and (ROOT / "CHANGELOG.md").is_file()
    assert "urls" not in PROJECT["project"]  # the forge says them, in the release
