"""Findings: what is wrong with a run, a JSON object a line, as `plait doctor` shows them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from plait.values import JsonMapping, JsonObject

KINDS: Final = ("hang", "straggler", "nan", "spike", "corruption")
FILE: Final = "findings.jsonl"


@dataclass(frozen=True)
class RunFinding:
    """One fault: whose it is, where it is, why.

    Attributes:
        kind: hang, straggler, nan, spike or corruption.
        rank: the rank at fault; None where it is unknown.
        step: the step under way, from 1.
        where: the communication, the schedule's cell, the module or the parameter.
        cause: the reason, in words that begin with one of a few.
        waits_for: the ranks that the rank at fault waits for itself.
        line: the line of Python that it is at.
        details: what else is known, by name.
    """

    kind: str
    rank: int | None
    step: int | None
    where: str
    cause: str
    waits_for: tuple[int, ...] = ()
    line: str | None = None
    details: JsonMapping = field(default_factory=dict)

    def as_dict(self) -> JsonObject:
        """The finding as plain data, its details beside the other keys."""
        known = asdict(self)
        details = known.pop("details")
        return {**known, "waits_for": list(self.waits_for), **details}

    def text(self) -> str:
        """One line for people."""
        return text_of(self.as_dict())


def text_of(finding: JsonMapping) -> str:
    """One line for people, of a finding as plain data."""
    rank = finding["rank"]
    who = "the run" if rank is None else f"rank {rank}"
    step = "" if finding["step"] is None else f" in step {finding['step']}"
    parts = [f"{finding['kind']}: {who}{step}, {finding['where']}: {finding['cause']}"]
    if finding["waits_for"]:
        parts.append(f"waits for {_ranks(finding['waits_for'])}")
    if finding["line"]:
        parts.append(f"at {finding['line']}")
    return "; ".join(parts)


def add(folder: Path, finding: RunFinding) -> None:
    """Leave a finding; a line is written whole, so that several processes may do so."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(finding.as_dict(), default=str) + "\n"
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def report(folder: Path, finding: RunFinding) -> None:
    """Leave a finding, and say it on stderr, also where the disk takes no line."""
    try:
        add(folder, finding)
    except OSError as error:
        say(f"{folder / FILE} takes no finding: {error.strerror}")
    say(finding.text())


def say(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"plait: {line}\n")
    sys.stderr.flush()


def read(folder: Path) -> list[JsonObject]:
    """The findings of a folder, in the order in which they were made; damaged lines are left
    out.
    """
    try:
        lines = (folder / FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and one.get("kind") in KINDS:
            entries.append({**asdict(RunFinding("", None, None, "", "")), **one})
    for one in entries:
        one.pop("details", None)
    return entries


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
