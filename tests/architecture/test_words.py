"""Docstrings that stand alone, in sentences that are understood at first reading.

An editor shows a docstring without the one before it. A sentence has at most 20 words. The name of
a class has one meaning.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import each_room, files, module, nodes, tree

# A docstring that opens so leans on a sentence that the reader does not see.
LEANING = re.compile(
    r"(The same|The inverse|Of|That of|What|As|Those|These|It|Its|They|Their|Nobody|Who|Whom|Whose"
    r"|Here|There|And|But|Also|Until|Likewise|Again|Anew)\b"
)

MOST_WORDS = 20
# Code, and the year or section of a citation, are not read as words.
CODE = re.compile(r"`[^`]*`|\([^()]*(?:\b\d{4}\b|\bsection\b|\barXiv\b)[^()]*\)")
WORD = re.compile(r"[(\"'*]*[A-Za-z][A-Za-z'-]*[)\"'*]*[.,:;!?]*[)\"'*]*")
# The end of a sentence: not that of "e.g.", "et al.", an initial or a range.
END = re.compile(
    r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bal\.)(?<!\b[A-Z]\.)(?<!\.\.)[\"')]*\s+"
)
# A line that begins an entry of a list: a dash, a number, a name and a colon, a term and a gap.
ENTRY = re.compile(
    r"[-*] |\d+[.)] |(?:[a-z_]\w*|[A-Z]\w*Error|[A-Z]\w*Failed|Raises|Shapes)(?:, \w+)*: "
    r"|\S.*?\S  +\S"
)
# Words that a reader with a second language meets in no textbook, and the plain ones.
PLAIN = {
    "anew": "again",
    "lest": "so that ... not",
    "nobody": "no rank, no caller, unknown",
    "somebody": "a rank, a caller",
    "whoever": "the rank that, the caller that",
    "the own": "this rank's",
    "is told of": "learns of",
    "are told of": "learn of",
}
UNPLAIN = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
MOST_UNPLAIN = 12  # of the whole source, which had 160 of them
FIGURE = "|"  # a line of a table or a drawing
# Names of locals that say nothing of what they hold, and the lines for which one may be alive.
VAGUE = {
    *("asked", "done", "found", "given", "held", "here", "kept", "made", "mine", "own"),
    *("rest", "said", "stuff", "taken", "thing", "told", "wanted"),
}
MOST_LINES = 15
# Names of classes that still have two meanings.
SHARED: set[str] = set()


def docstrings(root: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, and of every string below a field of a class."""
    for node in nodes(root):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for position, part in enumerate(node.body):
                text = _text_of(part)
                if text and (position == 0 or isinstance(node, (ast.ClassDef, ast.Module))):
                    yield part.lineno, text.strip()


def _text_of(statement: ast.stmt) -> str:
    """The string that is the whole statement; empty for any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else ""
    return ""


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring, and the entries of its lists."""
    for paragraph in re.split(r"\n\s*\n", text):
        parts: list[str] = []
        for line in map(str.strip, paragraph.splitlines()):
            if FIGURE in line or not line:
                continue
            if ENTRY.match(line) and parts:
                yield from END.split(" ".join(parts))
                parts = []
            parts.append(line)
        if parts:
            yield from END.split(" ".join(parts))


def count_words(sentence: str) -> int:
    """The words of a sentence; code, numbers and formulae are none."""
    return sum(1 for word in CODE.sub(" ", sentence).split() if WORD.fullmatch(word))


@each_room
def test_a_docstring_stands_alone(path: Path) -> None:
    leaning = [
        f"{line}: {text[:60]}" for line, text in docstrings(tree(path)) if LEANING.match(text)
    ]
    assert not leaning, f"{path.name}: name the subject first:\n" + "\n".join(leaning)


@each_room
def test_a_sentence_is_short(path: Path) -> None:
    long = [
        f"{line}: {count_words(sentence)} words: {sentence}"
        for line, text in docstrings(tree(path))
        for sentence in sentences(text)
        if count_words(sentence) > MOST_WORDS
    ]
    assert not long, f"{path.name}: at most {MOST_WORDS} words a sentence:\n" + "\n".join(long)


def test_words_are_plain_ones() -> None:
    unplain = [
        f"{module(path)}, {number}: '{word}' (better: {PLAIN[word.lower()]})"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in UNPLAIN.findall(line)
    ]
    assert len(unplain) <= MOST_UNPLAIN, "\n".join(unplain)


def test_sentences_end_where_a_reader_pauses() -> None:
    text = """One of J. Dean et al. is one sentence. Two (2012, section 3).

    seed: of the values.
    meet     wait for all; `a b c` is
    no word
    - a dash
    | a | table |
    """
    assert list(sentences(text)) == [
        "One of J. Dean et al. is one sentence.",
        "Two (2012, section 3).",
        "seed: of the values.",
        "meet     wait for all; `a b c` is no word",
        "- a dash",
    ]
    assert [count_words(sentence) for sentence in sentences(text)] == [9, 1, 4, 7, 2]


def test_the_name_of_a_class_has_one_meaning() -> None:
    homes = defaultdict(list)
    for path in files():
        for node in nodes(tree(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module(path))
    several = {name: places for name, places in homes.items() if len(places) > 1}
    several = {name: places for name, places in several.items() if name not in SHARED}
    assert not several, f"classes of one name, which two things share: {several}"


@each_room
def test_a_local_that_lives_long_says_what_it_holds(path: Path) -> None:
    vague = [
        f"{first}: `{name}` of {function} lives for {last - first} lines"
        for function, name, first, last in _locals(tree(path))
        if name in VAGUE and last - first > MOST_LINES
    ]
    assert not vague, f"{path.name}: name what they hold:\n" + "\n".join(vague)


def _locals(root: ast.Module) -> Iterator[tuple[str, str, int, int]]:
    """(function, name, first line that binds it, last line that reads it) of every local."""
    for function in nodes(root):
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            bound: dict[str, int] = {}
            for node in names:
                if isinstance(node.ctx, ast.Store):
                    bound[node.id] = min(node.lineno, bound.get(node.id, node.lineno))
            for name, first in bound.items():
                last = max(node.lineno for node in names if node.id == name)
                yield function.name, name, first, last
