"""Links out of `docs/`: files of the repository become pages of the site.

Documents link to code, configs and figures as they lie in the repository. The site has no
repository beside it, so each file that is linked to gets a page with its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml", ".cff": "yaml"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside `docs/` that a document links to."""
    wanted: set[Path] = set()
    pending = list(files.documentation_pages())
    while pending:
        file = pending.pop()
        for target in outside(file.src_uri, text_of(file)):
            if target in wanted:
                continue
            wanted.add(target)
            page = File.generated(config, uri_of(target), content=source_page(target))
            files.append(page)
            if target.suffix == ".md":
                pending.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at those pages."""
    return redirected(page.file.src_uri, markdown)


def text_of(file: File) -> str:
    """The Markdown of a page, with the links of the file that it shows."""
    return file.content_string


def outside(uri: str, text: str) -> list[Path]:
    """The files of the repository, outside `docs/`, that a page links to."""
    found = []
    for match in LINK.finditer(text):
        target = target_of(uri, match[1])
        if target is not None:
            found.append(target)
    return found


def target_of(uri: str, link: str) -> Path | None:
    """The file outside `docs/` that a link names; None for links inside, and for what is not."""
    base = ROOT / uri.removeprefix("repository/").removesuffix(".page.md")
    folder = base.parent if uri.startswith("repository/") else (DOCS / uri).parent
    target = Path(os.path.normpath(folder / link))
    if not target.is_relative_to(ROOT) or not target.exists():
        return None
    if target.is_relative_to(DOCS) and target != DOCS / "README.md" and not target.is_dir():
        return None
    return target


def uri_of(target: Path) -> str:
    """The page of a file: `repository/src/plait/x.py.page.md`."""
    return f"repository/{target.relative_to(ROOT).as_posix()}.page.md"


def source_page(target: Path) -> str:
    """The page: a document as it is, code in a block, a folder as the list of its files."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        entries = sorted(
            one.name for one in target.iterdir() if not one.name.startswith(("_", "."))
        )
        return "\n".join([f"# {name}/", "", *(f"- `{entry}`" for entry in entries), ""])
    if target.suffix == ".md":
        return target.read_text(encoding="utf-8")
    language = LANGUAGES.get(target.suffix, "text")
    return f"# {name}\n\n````{language}\n{target.read_text(encoding='utf-8')}\n````\n"


def redirected(uri: str, text: str) -> str:
    """The text with links to files outside `docs/` pointing at their pages."""
    own_folder = Path(uri).parent.as_posix()

    def link(match: re.Match[str]) -> str:
        anchor = match[2] or ""
        target = target_of(uri, match[1])
        if target is not None:
            return f"]({os.path.relpath(uri_of(target), own_folder)}{anchor})"
        if uri.startswith("repository/"):
            inside = (
                Path(os.path.normpath(ROOT / uri.removeprefix("repository/"))).parent / match[1]
            )
            path = Path(os.path.normpath(inside))
            if path.is_relative_to(DOCS):
                return f"]({os.path.relpath(path.relative_to(DOCS), own_folder)}{anchor})"
        return match[0]

    return LINK.sub(link, text)
