"""README and documents do what they say: commands are read, tables are compared with the code,
Python is run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.cli import table
from plait.cli.parser import Parser
from plait.plan import axes
from tests.architecture.source import ROOT, documents

README = ROOT / "README.md"
DOCUMENTS = documents()


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.M | re.S)


def table_rows(path: Path, *header: str) -> Iterator[list[str]]:
    """The rows of the table with this header, their cells without backticks."""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        if [cell.strip() for cell in line.strip("|").split("|")] == list(header):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    return
                yield [cell.strip() for cell in row.strip("|").split("|")]
    raise AssertionError(f"{path.name} has no table {header}")


def commands() -> list[tuple[str, str]]:
    return [
        (f"{path.name}: {line}", line)
        for path in DOCUMENTS
        for language in ("console", "sh")
        for block in blocks(path, language)
        for line in block.splitlines()
        if line.startswith("plait ")
    ]


def test_readme_opens_with_two_commands_of_one_line() -> None:
    text = README.read_text()
    first, second = blocks(README, "sh")
    assert len(first.splitlines()) == len(second.splitlines()) == 1
    assert text.index("```sh") < text.index("## The verbs")
    for command in (first, second):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
        assert "-c constraints.txt" in command
    config = first.split()[-1]
    assert "plait train" in first and (ROOT / config).is_file()
    assert "pytest" in second


@pytest.mark.parametrize("command", [pytest.param(line, id=name) for name, line in commands()])
def test_commands_in_documents_can_be_read(command: str) -> None:
    _, name, *words = shlex.split(command, comments=True)
    parser = Parser(f"plait {name}", "")
    table.load(name).add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    parser.parse(words)


def test_the_table_of_verbs_is_true() -> None:
    rows = dict(table_rows(README, "verb", "what it does"))
    assert {verb.strip("`"): what for verb, what in rows.items()} == table.VERBS


def test_the_table_of_the_plan_is_true() -> None:
    words = {
        term.strip("`"): re.findall("`([^`]+)`", said)
        for term, _, said in table_rows(README, "term", "splits", "words")
    }
    grammar = {
        "dp": (*axes.DATA_STRATEGIES, "replicate", "offload"),
        "tp": (*axes.TENSOR_MODES, "sp"),
        "pp": axes.PIPELINE_SCHEDULES,
        "cp": axes.CONTEXT_STRATEGIES,
        "remat": axes.REMAT_WORDS,
        "precision": axes.PRECISIONS,
    }
    for axis, known in grammar.items():
        (said,) = [said for term, said in words.items() if term.startswith(axis)]
        named = [re.sub(r"[KHMDV]$", "", word) for term in said for word in term.split(",") if word]
        options = {"stale", "every", "depth", "v"}
        assert list(dict.fromkeys(word for word in named if word not in options)) == sorted(
            known, key=named.index
        ), axis
        assert set(named) - options == set(known), axis


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


FOREIGN = {"nn/_linear.py"}
"""Files of other projects that a document names."""


def test_files_and_scripts_that_documents_name_are_there() -> None:
    """A decision may name what was there at its time."""
    files = [path.as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    tails = {"/".join(parts[at:]) for parts in map(_parts, files) for at in range(len(parts))}
    wrong = []
    for path in DOCUMENTS:
        if path.parent.name == "decisions":
            continue
        text = path.read_text()
        named = re.findall(r"`((?:\w+/)+\w+\.py)(?::\w+)?`", text)
        for module in re.findall(r"python -m ((?:benchmarks|tests)(?:\.\w+)*)", text):
            tail = module.replace(".", "/")
            named += [] if f"{tail}/__main__.py" in tails else [f"{tail}.py"]
        wrong += [f"{path.name}: {one}" for one in named if one not in tails | FOREIGN]
    assert wrong == []


def _parts(path: str) -> tuple[str, ...]:
    return Path(path).relative_to(ROOT).parts


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(code, id=f"{path.name}-{i}")
        for path in DOCUMENTS
        if path.name != "README.zh-CN.md"  # its blocks are those of README
        for i, code in enumerate(blocks(path, "python"))
    ],
)
def test_python_in_documents_runs(script: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_every_decision_has_its_own_number_and_is_in_the_index() -> None:
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [name[:4] for name in decisions]
    assert len(set(numbers)) == len(numbers), numbers
    index = (ROOT / "docs" / "README.md").read_text()
    assert [name for name in decisions if f"](decisions/{name})" not in index] == []
