"""Tables of the guides are those of the code, and the Chinese pages keep step with the English."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "site"))

import costs  # noqa: E402
import figures  # noqa: E402
import pages  # noqa: E402

TRANSLATIONS = {
    ROOT / "README.zh-CN.md": ROOT / "README.md",
    DOCS / "zh" / "start.md": DOCS / "start.md",
    DOCS / "zh" / "which.md": DOCS / "which.md",
}
CHINESE = re.compile("[\u4e00-\u9fff]")


def fenced(path: Path) -> list[str]:
    return re.findall(r"^```.*?^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def code_of_tables(path: Path) -> list[list[str]]:
    """The code and the numbers of each row of each table."""
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [re.findall(r"`[^`]+`|(?<= )[\d.]+%?(?= \|)", row) for row in rows]


def headings(path: Path) -> list[int]:
    return [
        len(line) - len(line.lstrip("#"))
        for line in re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S).split(
            "\n"
        )
        if line.startswith("#")
    ]


@pytest.mark.parametrize("name", costs.TABLES)
def test_the_table_of_costs_is_that_of_the_code(name: str) -> None:
    assert costs.written(name) == costs.TABLES[name]()


@pytest.mark.parametrize("chinese", TRANSLATIONS, ids=lambda path: path.name)
def test_a_translation_has_the_commands_and_the_tables_of_its_original(chinese: Path) -> None:
    english = TRANSLATIONS[chinese]
    assert fenced(chinese) == fenced(english)
    assert code_of_tables(chinese) == code_of_tables(english)
    assert headings(chinese) == headings(english)
    assert len(CHINESE.findall(chinese.read_text(encoding="utf-8"))) > 300


def test_every_strategy_of_the_code_has_a_page() -> None:
    of_one_rank = {name for name in pages.sources() if name.startswith(("remat ", "precision "))}
    assert set(pages.rows()) == set(pages.sources()) - {"one"} - of_one_rank
    assert {name for members in pages.FAMILIES.values() for name in members} == set(pages.rows())
    for row in pages.rows().values():
        assert (ROOT / row["code"]).exists()
        assert (ROOT / row["measured"]).exists()


@pytest.mark.parametrize("name", pages.rows())
def test_a_strategy_has_measured_figures_of_its_own(name: str) -> None:
    text = figures.figures(name)
    rows = [line for line in text if line.startswith("|")]
    assert len(rows) > 2 * len(figures.tables()[name])  # more than the headers
    for place in figures.tables()[name]:
        assert (ROOT / place["file"]).exists()
    for part in (
        pages.rows()[name]["pays"],
        pages.sources()[name].idea,
        pages.sources()[name].paper,
    ):
        assert part


def test_names_of_the_guides_are_in_the_reference() -> None:
    reference = pages.names()
    guides = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    used = set(re.findall(r"`(plait(?:\.[a-z_]+)+)`", guides)) - {"plait.toml"}
    lines = {line[3:] for line in reference.splitlines() if line.startswith("## ")}
    # Adapters of other libraries have a page of their own, which names all of each.
    own_page = {name for name in used if name.startswith(("plait.loops", "plait.outer"))}
    assert used - own_page - lines == {"plait.verify.differential"}  # in that of plait.verify


def test_the_menu_names_every_document() -> None:
    menu = {path for entries in pages.menu().values() for path, _ in entries}
    for path in [*DOCS.glob("*.md"), *(DOCS / "tutorials").glob("*.md"), *(DOCS / "zh").glob("*")]:
        if path.name not in ("README.md", "index.md"):
            assert path.relative_to(DOCS).as_posix() in menu


def test_the_reference_names_every_verb_key_and_name() -> None:
    import plait
    from plait.cli import table
    from plait.config.schema import keys

    said = pages.commands()
    assert all(f"## plait {verb}\n" in said for verb in table.VERBS)
    assert all(
        f"| `{key.key}` | `{key.type}`" in pages.config_keys().replace("\\|", "|") for key in keys()
    )
    assert all(f"## plait.{name}\n" in pages.names() for name in plait.__all__)
