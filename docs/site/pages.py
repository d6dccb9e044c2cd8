"""Pages of the documentation that are made from the code: strategies, commands, keys, names.

`pages()` yields paths below `docs/` and their Markdown. The build of the site writes them; nothing
of them lies in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from textwrap import wrap

from figures import figures

import plait
from plait.cli import table
from plait.cli.parser import Parser
from plait.config.schema import Key, json_schema, keys
from plait.errors import ConfigError
from plait.explain.explanation import Explanation, explain
from plait.explain.papers import PaperSource, sources
from plait.explain.text import lines
from plait.parallel.pipeline import render
from plait.toml import read_toml

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "Data parallel and ZeRO": (
        "allreduce",
        "ring",
        "server",
        "zero1",
        "zero2",
        "zero3",
        "async-server",
        "local",
    ),
    "Tensor parallel": ("1d", "1d,sp", "2d", "2.5d", "3d"),
    "Pipelines": (
        "naive",
        "gpipe",
        "1f1b",
        "interleaved",
        "zb-h1",
        "zb-h2",
        "zbv",
        "v-half",
        "v-min",
        "dualpipev",
        "pipedream",
        "2bw",
    ),
    "Sequences and experts": ("cp ring", "cp ulysses", "ep"),
}
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#e4a11b", "#9d755d")
CELL = 16


def pages() -> Iterator[tuple[str, str]]:
    """All generated pages: (path below docs/, Markdown)."""
    yield "strategies/index.md", strategies_index()
    for name, row in rows().items():
        yield f"strategies/{slug(name)}.md", strategy(name, row)
    yield "reference/commands.md", commands()
    yield "reference/config.md", config_keys()
    yield "reference/python.md", names()
    yield "extra/llms.txt", llms()
    yield "extra/reference/schema.json", schema()
    yield "index.md", front()


def rows() -> dict[str, dict[str, str]]:
    """What only the pages say of each strategy: term, code, when it pays, where it is measured."""
    return read_toml(Path(__file__).with_name("strategies.toml"), ConfigError)


def slug(name: str) -> str:
    """The name of a strategy in an address: `cp ring` is `cp-ring`."""
    return name.replace(" ", "-").replace(",", "-").replace(".", "-")


def strategies_index() -> str:
    """One table a family: term, idea in one line, paper."""
    text = ["# Strategies", "", "The numbers of each page are recorded from a run of the code.", ""]
    for family, members in FAMILIES.items():
        text += [f"## {family}", "", "| strategy | term | when it pays |", "|---|---|---|"]
        for name in members:
            row = rows()[name]
            link = f"[{sources()[name].title}]({slug(name)}.md)"
            text.append(f"| {link} | `{row['term']}` | {row['pays']} |")
        text.append("")
    return "\n".join(text)


def strategy(name: str, row: dict[str, str]) -> str:
    """One strategy: idea, drawing, formula, paper, code, measured figures, and its small case."""
    source: PaperSource = sources()[name]
    explanation = explain(row["term"])
    code, measured = row["code"], row["measured"]
    formula = [f"    {line}" for part in source.formula.split(";  ") for line in wrap(part, 76)]
    return "\n".join(
        [
            f"# {capital(source.title)}",
            "",
            source.idea,
            "",
            f"**When it pays.** {row['pays']}",
            "",
            drawing(explanation),
            "",
            "## Formula and paper",
            "",
            *formula,
            "",
            f"{source.paper}.",
            "",
            "## Code",
            "",
            f"[`{code}`](../../{code}). To see it, and to run it:",
            "",
            "```console",
            f"plait explain {quoted(row['term'])}",
            f"plait train examples/first_light.toml --plan {quoted(row['term'])}",
            "```",
            "",
            "## Measured",
            "",
            f"More is in [`{measured}`](../../{measured}), with the commands and the processor.",
            "",
            *figures(name),
            "## Step by step",
            "",
            "The code of a real run has run this small case. Every number is recorded from it.",
            "",
            "```text",
            *lines(explanation),
            "```",
            "",
        ]
    )


def capital(title: str) -> str:
    """A title with a capital first letter."""
    return title[:1].upper() + title[1:]


def quoted(term: str) -> str:
    """A term as a shell takes it."""
    return f'"{term}"' if " " in term else term


def drawing(explanation: Explanation) -> str:
    """A pipeline's grid of actions; for other strategies, the part of each weight on each rank."""
    if explanation.schedule is not None:
        return f'<div style="overflow-x:auto">{render.svg(explanation.schedule)}</div>'
    return f'<div style="overflow-x:auto">{_weights(explanation)}</div>'


def _weights(explanation: Explanation) -> str:
    """One row a rank, one column a weight; cells that the rank keeps or updates are coloured."""
    parts: list[str] = []
    left = 60
    width = left
    top = 22
    for rank, recording in enumerate(explanation.as_dict()["holds"]):
        x = left
        height = 0
        for weight in recording["updates"]:
            height = max(height, weight["of_shape"][0] * CELL)
        parts.append(f'<text x="4" y="{top + height / 2 + 4}">rank {rank}</text>')
        for weight in sorted(recording["updates"], key=lambda one: one["name"]):
            num_rows, num_columns = weight["of_shape"][0], weight["of_shape"][-1]
            if rank == 0:
                parts.append(f'<text x="{x}" y="14">{weight["name"]}</text>')
            kept = _kept(weight)
            for i in range(num_rows):
                for j in range(num_columns):
                    colour = COLOURS[rank % len(COLOURS)] if (i, j) in kept else "none"
                    parts.append(
                        f'<rect x="{x + j * CELL}" y="{top + i * CELL}" width="{CELL - 1}" '
                        f'height="{CELL - 1}" fill="{colour}" stroke="#8a8f98"/>'
                    )
            x += max(num_columns * CELL, 8 * len(weight["name"])) + 24
        width = max(width, x)
        top += height + 14
    style = "<style>text{font:12px sans-serif;fill:currentColor}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" role="img">'
    title = "<title>The part of each weight that a rank updates</title>"
    return f"{head}{title}{style}{''.join(parts)}</svg>"


def _kept(weight: dict[str, object]) -> set[tuple[int, int]]:
    """The (row, column) cells of a weight that a rank updates.

    A block is cut from the weight by offset and extent; a run of numbers, row by row, from the
    block.
    """
    offset, extent = weight["offset"], weight["extent"]
    assert isinstance(offset, list) and isinstance(extent, list)
    first, end = weight["elements"]  # type: ignore[misc]
    num_columns = extent[-1]
    cells = set()
    for number in range(first, end):
        row, column = divmod(number, num_columns)
        cells.add((offset[0] + row, offset[-1] + column))
    return cells


def commands() -> str:
    """The help text of every verb."""
    text = ["# Commands", ""]
    for verb, what in table.VERBS.items():
        parser = Parser(f"plait {verb}", what)
        table.load(verb).add_arguments(parser)
        text += [f"## plait {verb}", "", "```text", help_of(parser).rstrip(), "```", ""]
    return "\n".join(text)


def help_of(parser: argparse.ArgumentParser) -> str:
    """The help text of a parser."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        parser.print_help()
    return said.getvalue()


def config_keys() -> str:
    """Every key of a config, by section."""
    text = [
        "# Configuration",
        "",
        'There is a <a href="schema.json">JSON schema</a> for editors. `plait config --schema` '
        "prints it, and `plait config --list` prints the tables below. An editor that uses Taplo "
        "finds the schema by the first line of a config:",
        "",
        "```toml",
        "#:schema ./schema.json",
        "```",
        "",
    ]
    section = ""
    for key in keys():
        place = f"[{key.section}] of `{key.model}`" if key.model else f"[{key.section}]"
        if place != section:
            section = place
            text += ["", f"## {place}", "", "| key | type | default | meaning |"]
            text.append("|---|---|---|---|")
        text.append(config_row(key))
    return "\n".join([*text, ""])


def config_row(key: Key) -> str:
    """One key as a row of Markdown."""
    default = "required" if key.required else f"`{json.dumps(key.default)}`"
    cells = (f"`{key.key}`", f"`{key.type}`", default, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def names() -> str:
    """The names of the door, documented from their docstrings."""
    text = [
        "# Python",
        "",
        "The first names are imported from `plait` itself, the others from their modules.",
        "",
    ]
    for name in plait.__all__:
        room = plait._ROOMS[name]
        target = room if room == f"plait.{name}" else f"{room}.{name}"
        kind = directive(getattr(plait, name))
        text += [f"## plait.{name}", "", "```{eval-rst}", f".. {kind}:: {target}", "```", ""]
    for target in FURTHER:
        kind = directive(resolve_name(target))
        text += [f"## {target}", "", "```{eval-rst}", f".. {kind}:: {target}", "```", ""]
    return "\n".join(text)


def directive(value: object) -> str:
    """The directive of Sphinx that documents a value."""
    if inspect.ismodule(value):
        return "automodule"
    return "autoclass" if inspect.isclass(value) else "autofunction"


def schema() -> str:
    """The JSON schema of a config."""
    return json.dumps(json_schema(), indent=1)


FURTHER = (
    "plait.predict.cost.describe",
    "plait.predict.cost.block_table",
    "plait.checkpoint.elsewhere.write_dcp",
    "plait.parallel.pipeline.lower",
    "plait.parallel.pipeline.replicate",
    "plait.models",
    "plait.datasets.packing",
)
"""Names that the guides use beside those of the door; each is a module or lies in one."""
REFERENCE = {"commands": "Commands", "config": "Configuration", "python": "Python"}
GUIDES: Sequence[tuple[str, str]] = (
    ("index.md", "plait"),
    ("start.md", "Start here"),
    ("which.md", "Which strategy should I use?"),
)


def page_of(path: str) -> str:
    """The address of a document on the site."""
    return f"{path.removesuffix('.md')}.html"


def documents(folder: Path) -> list[tuple[str, str]]:
    """(path below docs/, title) of the Markdown files in a folder."""
    found = []
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md" or (path.parent == ROOT / "docs" and path.name in _guides()):
            continue
        found.append((path.relative_to(ROOT / "docs").as_posix(), title_of(path)))
    return found


def _guides() -> set[str]:
    return {path for path, _ in GUIDES}


def title_of(path: Path) -> str:
    """The first heading of a document."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line[2:].strip()
    return path.stem


def front() -> str:
    """The first page, with the menu of all others."""
    text = [(ROOT / "docs" / "index.md").read_text(encoding="utf-8"), ""]
    for caption, entries in menu().items():
        text += ["```{toctree}", ":hidden:", f":caption: {caption}", ":maxdepth: 1", ""]
        text += [f"{title} <{path.removesuffix('.md')}>" for path, title in entries]
        text += ["```", ""]
    return "\n".join(text)


def menu() -> dict[str, list[tuple[str, str]]]:
    """The menu: heading -> (path below docs/, title) of its pages."""
    docs = ROOT / "docs"
    families = {
        family: [
            (f"strategies/{slug(name)}.md", capital(sources()[name].title)) for name in members
        ]
        for family, members in FAMILIES.items()
    }
    return {
        "Guides": [*GUIDES[1:], *documents(docs / "tutorials")],
        "Strategies": [("strategies/index.md", "All strategies")],
        **families,
        "Reference": [(f"reference/{name}.md", title) for name, title in REFERENCE.items()],
        "Topics": documents(docs),
        "Decisions": documents(docs / "decisions"),
        "中文": documents(docs / "zh"),
    }


def llms() -> str:
    """The site in one file for language models: what it is, and where each thing is said."""
    text = [
        "# plait",
        "",
        "> Every way to parallelise PyTorch training: planned, proven, measured.",
        "",
    ]
    text += ["## Documents", ""]
    places = [*GUIDES, *documents(ROOT / "docs" / "tutorials"), *documents(ROOT / "docs")]
    text += [f"- [{title}]({page_of(path)})" for path, title in places]
    text += ["", "## Strategies", ""]
    for name in rows():
        text.append(
            f"- [{sources()[name].title}](strategies/{slug(name)}.html): {rows()[name]['pays']}"
        )
    text += ["", "## Reference", ""]
    text += [f"- [{title}](reference/{name}.html)" for name, title in REFERENCE.items()]
    text.append("- [JSON schema of a config](reference/schema.json)")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    for page, content in pages():
        print(f"{len(content):8d}  {page}", file=sys.stderr)
