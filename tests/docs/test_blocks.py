"""Every block of code in the documents is held by a test: by its kind, or by one named here.

Commands and Python are read and run in `tests/architecture/test_documents.py`; the files that
tutorials name are written and used in `test_tutorials.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.config.schema import keys
from plait.parallel.pipeline.text import loads
from plait.plan import axes
from plait.toml import parse_toml
from tests.architecture.source import ROOT, documents

DOCUMENTS = documents()
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
STARTERS = ("plait ", "python ", "torchrun ", "pip install ", "uvx ")
TUTORIALS = ("tutorials", "start.md", "which.md")
TEXTS = {
    ("explain.md", "dp2:zero3"): "tests/unit/explain/test_explain.py",
    ("pipeline.md", "name mine"): "test_the_schedule_of_the_page_is_one",
    ("verify.md", "def test_my_step"): "tests/parity/test_pytest_plugin.py",
    ("architecture.md", " cli/"): "tests/architecture/test_imports.py",
    ("architecture.md", " parameters"): "tests/unit/parallel/data/test_sharded_unit.py",
}
"""Blocks that are no code of ours: what they show, and where it is held."""


def blocks() -> list[tuple[Path, str, str]]:
    return [
        (path, *found) for path in DOCUMENTS for found in BLOCK.findall(path.read_text("utf-8"))
    ]


FRAGMENTS = [
    pytest.param(code, id=f"{path.name}-{index}")
    for index, (path, kind, code) in enumerate(blocks())
    if kind == "toml"
]


def test_every_block_is_of_a_kind_that_is_held() -> None:
    for path, kind, code in blocks():
        name = f"{path.name}: {kind}: {code[:40]}"
        if kind == "console":
            lines = [line for line in code.splitlines() if line and not line.startswith(" ")]
            assert all(line.startswith(STARTERS) for line in lines), name
        elif "title=" in kind:
            assert any(word in path.parts for word in TUTORIALS), name
        elif kind in ("text", ""):
            known = {start for page, start in TEXTS if page == path.name}
            assert any(code.startswith(start) for start in known), name
        else:
            assert kind in ("python", "toml", "sh", "diff", "yaml"), name


@pytest.mark.parametrize("code", FRAGMENTS)
def test_fragments_of_a_config_have_keys_of_the_schema(code: str) -> None:
    known = {(key.section, key.key) for key in keys()}
    for section, values in parse_toml(code, ValueError, "a fragment").items():
        for key in values:
            assert (section, key) in known, (section, key)


@pytest.mark.parametrize("kind", ["diff", "yaml"])
def test_lines_that_are_added_are_code(kind: str) -> None:
    for path, found, code in blocks():
        if found == "diff":
            lines = [line for line in code.splitlines() if line and line[0] in "+ "]
            compile("\n".join(line[1:] for line in lines), str(path), "exec")
        elif found == kind == "yaml":
            pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(code)


def test_the_schedule_of_the_page_is_one() -> None:
    (code,) = [
        code for path, kind, code in blocks() if path.name == "pipeline.md" and kind == "text"
    ]
    assert loads(code).name == "mine"


def test_the_glossary_has_every_word_of_a_plan() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = {*axes.DATA_STRATEGIES, *axes.TENSOR_MODES, *axes.PIPELINE_SCHEDULES}
    words |= {*axes.CONTEXT_STRATEGIES, *axes.REMAT_WORDS, "replicate", "offload", "sp", "ep", "cp"}
    assert sorted(word for word in words if f"`{word}`" not in text) == []
