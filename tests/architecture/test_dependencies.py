"""What an installation of plait brings along: no package that only one data set reads."""

from __future__ import annotations

import re

from plait.errors import ConfigError
from plait.toml import read_toml
from tests.architecture.source import ROOT


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", text)[0] for text in requirements}


def test_what_reads_one_data_set_is_an_extra() -> None:
    project = read_toml(ROOT / "pyproject.toml", ConfigError)["project"]
    extras = {extra: names(found) for extra, found in project["optional-dependencies"].items()}
    assert not {"scikit-learn", "scipy"} & names(project["dependencies"])
    assert not {"pyarrow", "datasets", "tokenizers"} & names(project["dependencies"])
    assert {"pyarrow", "datasets", "tokenizers"} <= extras["data"]
    assert "scikit-learn" in extras["digits"] & extras["test"]
