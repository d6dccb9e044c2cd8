"""Guides in sentences that somebody whose second language is English reads once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.architecture.test_words import END, count_words

MOST_WORDS = 22
DOCS = ROOT / "docs"
# Books of measurements and of the code, for readers who look something up.
BOOKS = {"architecture.md", "atlas.md", "measured.md", "models.md", "pipeline.md", "planner.md"}
GUIDES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.glob("*.md") if path.name not in BOOKS),
    *sorted((DOCS / "tutorials").glob("*.md")),
]
BLOCK = re.compile(r"^```.*?^```$|<!--.*?-->", re.M | re.S)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
ENTRY = re.compile(r"(?:[-*+]|\d+\.) ")


def passages(text: str) -> Iterator[str]:
    """Paragraphs, entries of lists and cells of tables, each on one line."""
    lines: list[str] = []
    for line in [*map(str.strip, BLOCK.sub("", text).splitlines()), ""]:
        ends = not line or line[0] in "|#!" or ENTRY.match(line)
        if ends and lines:
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|"))
        elif line and line[0] not in "#!":
            lines.append(line)


def long_sentences(text: str) -> list[str]:
    """Sentences of more words than a reader keeps in mind."""
    return [
        f"{count_words(sentence)} words: {sentence}"
        for passage in passages(LINK.sub(r"\1", text))
        for sentence in END.split(passage)
        if count_words(sentence) > MOST_WORDS
    ]


@pytest.mark.quick
@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_guide_has_short_sentences(path: Path) -> None:
    assert long_sentences(path.read_text(encoding="utf-8")) == []


@pytest.mark.quick
def test_a_long_sentence_is_seen() -> None:
    words = "word " * MOST_WORDS
    assert long_sentences(f"- {words}.\n- {words}.") == []
    (found,) = long_sentences(f"Short.\n{words}\n[more](place.md). Short.")
    assert found.startswith(f"{MOST_WORDS + 1} words")
    assert long_sentences(f"| a | {words} more |") != []
    assert long_sentences(f"```\n{words} more\n```") == []
