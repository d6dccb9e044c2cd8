"""Write the addresses of this repository into what a release packs: `python .github/addresses.py`.

The forge says where it is: `GITHUB_SERVER_URL`, `GITHUB_REPOSITORY` and the tag in
`GITHUB_REF_NAME`. pyproject.toml gets a table `[project.urls]`. Links of the README lead to files
of the tag, because the page of a package has no files beside it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

NEEDED = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def urls(environment: Mapping[str, str]) -> dict[str, str]:
    """Label -> address, as `[project.urls]` has them."""
    home = f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
    tag = environment["GITHUB_REF_NAME"]
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/{tag}/docs/README.md",
        "Source": home,
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
    }


def with_urls(project: str, addresses: Mapping[str, str]) -> str:
    """The text of pyproject.toml with a table of addresses."""
    rows = "".join(f'{label} = "{address}"\n' for label, address in addresses.items())
    return f"{project.rstrip()}\n\n[project.urls]\n{rows}"


def with_whole_links(readme: str, environment: Mapping[str, str]) -> str:
    """A README whose links and pictures are addresses of the tag."""
    home, tag = urls(environment)["Homepage"], environment["GITHUB_REF_NAME"]

    def whole(match: re.Match[str]) -> str:
        picture, words, place = match.groups()
        return f"{picture}[{words}]({home}/{'raw' if picture else 'blob'}/{tag}/{place})"

    return LINK.sub(whole, readme)


def main() -> int:
    """Change pyproject.toml and README.md in the working folder."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        print(f"not set: {', '.join(missing)}", file=sys.stderr)
        return 2
    project, readme = Path("pyproject.toml"), Path("README.md")
    text = project.read_text(encoding="utf-8")
    if "[project.urls]" in text:
        print("pyproject.toml has [project.urls] already", file=sys.stderr)
        return 2
    project.write_text(with_urls(text, urls(os.environ)), encoding="utf-8")
    readme.write_text(
        with_whole_links(readme.read_text(encoding="utf-8"), os.environ), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
