"""Build the page of plans as files for any static host: the same Python runs in the reader's tab.

python docs/site/explore/build.py OUT

Python for the browser is Pyodide, whose files come from its npm package (npm is needed, once). Look
at the result with `python -m http.server --directory OUT`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import plait
from plait.cli.explore import beginning, opening_of
from plait.explore.html import TAB, page

PYODIDE = "314.0.7"
FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
HERE = Path(__file__).parent
ROOMS = ("cli", "cluster", "comm", "config", "explore", "launcher", "mesh", "plan", "run", "trace")
INNER = ("parallel/pipeline", "predict")
"""Rooms of plait whose Python the page reaches."""
KINDS = {".py", ".json", ".toml"}


def pyodide_into(folder: Path, package: Path | None = None) -> None:
    """The files of Pyodide; `package` is its npm package, where it is already there."""
    with tempfile.TemporaryDirectory() as scratch:
        if package is None:
            words = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
            subprocess.run(words, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            package = next(Path(scratch).glob("pyodide-*.tgz"))
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(package) as archive:
            for name in FILES:
                found = archive.extractfile(f"package/{name}")
                assert found is not None, name
                (folder / name).write_bytes(found.read())


def plait_into(file: Path) -> None:
    """The Python that the page reaches, as one archive."""
    root = Path(plait.__file__).parent
    rooms = [root / name for name in (*ROOMS, *INNER)]
    paths = [*root.glob("*.py"), *root.glob("parallel/*.py")]
    paths += [path for room in rooms for path in room.rglob("*") if path.suffix in KINDS]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths):
            archive.write(path, path.relative_to(root.parent))


def build(out: Path, package: Path | None = None) -> None:
    """The whole page under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    html, _ = page({**beginning(opening_of(None, None)), "tab": True}, TAB)
    (out / "index.html").write_text(html, encoding="utf-8")
    shutil.copy(HERE / "worker.mjs", out / "worker.mjs")
    plait_into(out / "plait.zip")
    pyodide_into(out / "pyodide", package)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder that is written")
    parser.add_argument("--pyodide", type=Path, help="the npm package of Pyodide, as a .tgz")
    given = parser.parse_args()
    build(given.out, given.pyodide)
    print(f"{given.out}/index.html", file=sys.stderr)
