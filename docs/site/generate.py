"""Write the generated pages into the site while MkDocs builds it."""

from __future__ import annotations

import sys
from pathlib import Path

import mkdocs_gen_files

sys.path.insert(0, str(Path(__file__).parent))

from pages import pages

for path, text in pages():
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)
