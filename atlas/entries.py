"""Entries of the atlas, read from their folders, and the verdict on one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError
from plait.toml import read_toml
from plait.verify import Report
from plait.verify.outside.source import FunctionSource, parse
from plait.verify.outside.task import Trial

ROOT = Path(__file__).parent
PACKAGES = Path(os.environ.get("PLAIT_ATLAS_PACKAGES", ROOT.parent / "build" / "atlas"))
"""Where packages of old versions lie, each in a folder of its own."""
STEPS = 2


@dataclass(frozen=True)
class Entry:
    """One public error. `package` is the package that errs; empty for own words.

    `wheels` are requirements that are put into a folder of their own, where the error is in another
    version than the installed one. `causes` are causes of which verify must name one, `words` must
    stand in its findings. `dtype` is float32 for a package that computes updates in nothing else.
    """

    name: str
    framework: str
    link: str
    saw: str
    why: str
    package: str
    causes: tuple[str, ...]
    words: str
    nproc: int = 2
    wheels: tuple[str, ...] = ()
    dtype: str = "float64"

    def source(self, function: str) -> FunctionSource:
        """The step `broken` or `fixed`: a function of `steps.py`, or a file of that name."""
        own = ROOT / self.name / f"{function}.py"
        return parse(str(own)) if own.is_file() else parse(f"{own.parent / 'steps.py'}:{function}")

    @property
    def folder(self) -> Path:
        """Where the wheels lie."""
        return PACKAGES / self.wheels[0].replace("==", "-")

    @property
    def version(self) -> str:
        """The package with its version, as the table shows it."""
        if self.wheels:
            return self.wheels[0].replace("==", " ")
        return f"{self.package} {importlib.metadata.version(self.package).split('+')[0]}"

    @property
    def missing(self) -> str:
        """What to type so that the package is there; empty where it is."""
        if self.wheels:
            wanted = " ".join(self.wheels)
            command = f"pip install --no-deps --target {self.folder} {wanted}"
            return "" if self.folder.is_dir() else command
        there = not self.package or importlib.util.find_spec(self.package) is not None
        return "" if there else f"pip install {self.package}"

    @contextmanager
    def on_path(self) -> Iterator[None]:
        """Let ranks that start in here find the wheels first."""
        if not self.wheels:
            yield
            return
        sys.path.insert(0, str(self.folder))
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))


@dataclass(frozen=True)
class Verdict:
    """The answers on both steps of an entry; `wrong` says what is not as it should be."""

    entry: Entry
    says: str
    wrong: str


Judge = Callable[[Trial, int], Report]


def entries() -> list[Entry]:
    """All entries, by name."""
    found = []
    for path in sorted(ROOT.glob("*/entry.toml")):
        keys = read_toml(path, ConfigError)
        for key in ("causes", "wheels"):
            keys[key] = tuple(keys.get(key, ()))
        found.append(Entry(path.parent.name, **keys))
    return found


def verdict(entry: Entry, judge: Judge) -> Verdict:
    """Both steps of an entry, judged."""
    with entry.on_path():
        broken = judge(Trial(entry.source("broken"), STEPS, entry.dtype), entry.nproc)
        fixed = judge(Trial(entry.source("fixed"), STEPS, entry.dtype), entry.nproc)
    says = "; ".join(one.text for one in broken.findings[:2])
    named = [one for one in broken.findings if one.cause in entry.causes]
    if named and named[0] not in broken.findings[:2]:
        says = f"{named[0].text}; {says}"
    wrong = ""
    if not fixed.ok:
        wrong = f"a false alarm on the control: {fixed.text()}"
    elif broken.ok:
        wrong = "the error passed"
    elif not named or entry.words not in says:
        wrong = f"the cause is not named: {[one.cause for one in broken.findings]}: {says}"
    return Verdict(entry, says, wrong)
