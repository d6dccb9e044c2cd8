"""Entries of the atlas, read from their folders, and the verdict on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError
from plait.toml import read_toml
from plait.verify import Report
from plait.verify.outside.source import FunctionSource, parse
from plait.verify.outside.task import Trial

ROOT = Path(__file__).parent
STEPS = 2


@dataclass(frozen=True)
class Entry:
    """One public error. `package` is the installed package that errs; empty for own words.

    `causes` are causes of which verify must name one, `words` must stand in its findings.
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

    def source(self, function: str) -> FunctionSource:
        """The step `broken` or `fixed`."""
        return parse(f"{ROOT / self.name / 'steps.py'}:{function}")


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
        keys["causes"] = tuple(keys["causes"])
        found.append(Entry(path.parent.name, **keys))
    return found


def verdict(entry: Entry, judge: Judge) -> Verdict:
    """Both steps of an entry, judged."""
    broken = judge(Trial(entry.source("broken"), STEPS), entry.nproc)
    fixed = judge(Trial(entry.source("fixed"), STEPS), entry.nproc)
    says = "; ".join(one.text for one in broken.findings[:2])
    causes = [one.cause for one in broken.findings]
    wrong = ""
    if not fixed.ok:
        wrong = f"a false alarm on the control: {fixed.text()}"
    elif broken.ok:
        wrong = "the error passed"
    elif entry.words not in says or not set(causes) & set(entry.causes):
        wrong = f"the cause is not named: {causes}: {says}"
    return Verdict(entry, says, wrong)
