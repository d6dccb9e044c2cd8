"""Build the documentation site: `python docs/site/build.py [--out build/site] [--explore]`.

The pages of `docs/` are copied, those that come from code are written beside them, and Sphinx makes
HTML of both. Links out of `docs/` lead to pages of those files, since the site has no repository
beside it. `--explore` adds the page of plans, whose Python runs in the reader's tab.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pages import ROOT, pages

DOCS = ROOT / "docs"
TITLED = re.compile(r'^```(\w+) title="([^"]+)"\n', re.M)
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml", ".json": "json"}
PICTURES = (".svg", ".png")
LEFT_OUT = ("README.md", "site")
EXPLORE_PLACE = "explore-plans"
EXPLORE_LINK = (
    f'<a href="{EXPLORE_PLACE}/index.html">Look at plans in this browser</a>: the planner runs in '
    "the tab, and nothing is sent anywhere."
)


def main() -> int:
    """Build; the exit code of Sphinx."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--explore", action="store_true", help="needs npm")
    arguments = parser.parse_args()
    source = arguments.out.parent / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    prepare(source, explore=arguments.explore)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    code = subprocess.run([*command, str(source), str(arguments.out)], check=False).returncode
    if code == 0 and arguments.explore:
        page = [sys.executable, str(DOCS / "site" / "explore" / "build.py")]
        code = subprocess.run([*page, str(arguments.out / EXPLORE_PLACE)], check=False).returncode
    return code


def prepare(source: Path, *, explore: bool = False) -> None:
    """Write the sources of the site into a folder; `explore` says that the page of plans comes."""
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(Path(__file__).with_name("conf.py"), source)
    for path, text in pages():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if explore:
        index = source / "index.md"
        index.write_text(f"{index.read_text(encoding='utf-8')}\n{EXPLORE_LINK}\n", encoding="utf-8")
    pending = sorted(source.rglob("*.md"))
    while pending:
        page = pending.pop()
        pending += redirect(page, source)


def redirect(page: Path, source: Path) -> list[Path]:
    """Point the links of a page at pages of the site, and write the names of files above their
    code; returns the pages made for the links.
    """
    made: list[Path] = []

    def link(match: re.Match[str]) -> str:
        target = origin(page, source).parent / match[1]
        target = Path(os.path.normpath(target))
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        place = place_of(target, source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix in PICTURES:
                shutil.copy(target, place)
            else:
                place.write_text(page_of(target), encoding="utf-8")
                made.append(place)
        return f"]({os.path.relpath(place, page.parent)}{match[2] or ''})"

    text = page.read_text(encoding="utf-8")
    text = TITLED.sub(r"```{code-block} \1\n:caption: \2\n\n", text)
    page.write_text(LINK.sub(link, text), encoding="utf-8")
    return made


def origin(page: Path, source: Path) -> Path:
    """The file of the repository whose links a page has."""
    inside = page.relative_to(source)
    if inside.parts[0] == "repository":
        return ROOT / inside.relative_to("repository").as_posix().removesuffix(".page.md")
    return DOCS / inside


def place_of(target: Path, source: Path) -> Path:
    """The file of the site that shows a file of the repository."""
    inside = target.is_relative_to(DOCS) and target.is_file() and target != DOCS / "README.md"
    if inside and target.suffix in (".md", *PICTURES):
        return source / target.relative_to(DOCS)
    name = target.relative_to(ROOT).as_posix()
    if target.suffix in PICTURES:
        return source / "repository" / name
    return source / "repository" / f"{name}.page.md"


def page_of(target: Path) -> str:
    """A document as it is, code in a block, a folder as the list of its files."""
    name = target.relative_to(ROOT).as_posix()
    head = "---\norphan: true\n---\n"
    if target.is_dir():
        entries = sorted(one.name for one in target.iterdir() if one.name[0] not in "_.")
        return "\n".join([head, f"# {name}/", "", *(f"- `{entry}`" for entry in entries), ""])
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return head + text
    language = LANGUAGES.get(target.suffix, "text")
    return f"{head}\n# {name}\n\n`````{language}\n{text}\n`````\n"


if __name__ == "__main__":
    sys.exit(main())
