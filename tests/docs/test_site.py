"""What the site's build writes beside the documents: addresses that exist, and nothing unsaid."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from plait.config.schema import keys
from tests.architecture.source import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))

import build
import conf
import pages


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the site, with strategies that are not run."""
    folder = tmp_path_factory.mktemp("site") / "source"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "strategy", lambda name, row: f"# {name}\n")
        build.prepare(folder, explore=True)
    return folder


def test_the_addresses_of_llms_txt_are_pages_of_the_site(source: Path) -> None:
    text = (source / "extra" / "llms.txt").read_text()
    addresses = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", text, re.M)
    assert len(addresses) > 50
    for address in addresses:
        page = source / address.replace(".html", ".md")
        assert page.is_file() or (source / "extra" / address).is_file(), address


def test_the_front_page_leads_to_the_page_of_plans_where_it_is_built(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = 'href="explore-plans/index.html"'
    assert link in (source / "index.md").read_text()
    monkeypatch.setattr(pages, "strategy", lambda name, row: f"# {name}\n")
    build.prepare(tmp_path / "plain")
    assert link not in (tmp_path / "plain" / "index.md").read_text()


def test_a_file_of_a_guide_has_its_name_above_it(source: Path) -> None:
    assert "```{code-block} toml\n:caption: small.toml\n" in (source / "start.md").read_text()


def test_the_schema_for_editors_has_every_key(source: Path) -> None:
    schema = json.loads((source / "extra" / "reference" / "schema.json").read_text())
    text = json.dumps(schema)
    assert all(f'"{key.key}"' in text for key in keys())
    assert 'href="schema.json"' in (source / "reference" / "config.md").read_text()


@pytest.mark.parametrize("default", ["<factory>", "<function <lambda>>", "<function f at 0x7f>"])
def test_a_signature_of_the_reference_is_read_as_python(default: str) -> None:
    text = f"(of: ~collections.abc.Callable[[int], float] = {default}, n: int = 1)"
    signature, returns = conf.readable(None, "function", "f", None, None, text, "int")
    assert returns == "int" and " = ..., n: int = 1)" in signature
    ast.parse(f"def f{signature.replace('~', '')}: ...")
    assert conf.readable(None, "module", "m", None, None, None, None) == (None, None)


def test_a_docstring_has_no_table_of_markdown() -> None:
    """The reference is reStructuredText, where its rows would be one line."""
    for path in (ROOT / "src").rglob("*.py"):
        assert "\n|---" not in path.read_text(), path
