"""The branches of a shell script: `if` and `case`, and which of them run."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_WORD: Final = re.compile(r"(\w+)(?:\s+(.*))?$", re.DOTALL)
_CASE: Final = re.compile(r"(.+?)\s+in(?:\s+(.*))?$", re.DOTALL)
_PATTERN: Final = re.compile(r"\(?\s*([^()]+?)\s*\)\s*(.*)$", re.DOTALL)
_TEST: Final = re.compile(r"\[\[?\s+(\S+)\s+(==?|!=|-eq|-ne|-lt|-le|-gt|-ge)\s+(\S+)\s+\]\]?")
_TURNS: Final = frozenset({"elif", "else", "fi", "esac"})
_END_OF_CLAUSE: Final = ";;"
_NUMBERS: Final = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def statements_of(line: str) -> list[str]:
    """The statements of a line: what `;` parts outside quotes. `;;` is one of its own."""
    parts = [""]
    mark = ""
    for letter in line:
        if letter in "\"'" and mark in ("", letter):
            mark = "" if mark else letter
        if letter != ";" or mark:
            parts[-1] += letter
        elif not parts[-1] and len(parts) > 1:
            parts[-1:] = [_END_OF_CLAUSE, ""]
        else:
            parts.append("")
    return [part for part in parts if part.strip()] or [line]


@dataclass
class _Fork:
    """An `if` with its branches, or a `case` of a subject."""

    subject: str | None = None
    runs: bool | None = None
    """Whether the present branch runs; None where its condition is open."""
    chosen: bool = False
    doubted: bool = False
    in_clause: bool = False

    def take(self, truth: bool | None) -> None:
        """Begin the next branch, whose condition has a truth."""
        if self.chosen or truth is False:
            self.runs = False
        elif self.doubted or truth is None:
            self.runs = None
            self.doubted = True
        else:
            self.runs = True
            self.chosen = True


class Branches:
    """The blocks around the present statement."""

    def __init__(self, expand: Callable[[str], str]) -> None:
        """`expand` puts the values of variables into a text."""
        self._expand = expand
        self._blocks: list[_Fork] = []

    @property
    def runs(self) -> bool | None:
        """Whether the present statement runs; None where a condition is open."""
        states = [block.runs for block in self._blocks]
        return False if False in states else None if None in states else True

    def enter(self, statement: str) -> str:
        """The part of a statement that runs, beside opening a branch or ending a block."""
        text = statement.strip()
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.subject is not None and not block.in_clause:
            return self._clause(block, text)
        found = _WORD.match(text)
        word, rest = (found.group(1), found.group(2) or "") if found else ("", "")
        case = _CASE.match(rest) if word == "case" else None
        if case is not None:
            self._blocks.append(_Fork(self._expand(case.group(1)).strip("\"'")))
            return self.enter(case.group(2) or "")
        if word in ("then", "do"):
            return self.enter(rest)
        if word == "if" and not rest.endswith(":"):  # a colon: Python's, in a text of the script
            block = _Fork()
            self._blocks.append(block)
        elif block is None or word not in _TURNS:
            if block is not None and text == _END_OF_CLAUSE:
                block.in_clause = False
            return statement
        return self._turn(block, word, rest)

    def _turn(self, block: _Fork, word: str, rest: str) -> str:
        """Begin another branch of a block, or end the block. The rest of the line is returned."""
        if word in ("fi", "esac"):
            self._blocks.pop()
            return rest
        if word == "else":
            block.take(True)
            return self.enter(rest)
        block.take(self._truth(rest))
        return ""

    def _clause(self, block: _Fork, text: str) -> str:
        """Begin a clause of a `case` with its patterns, or end the `case`."""
        if text.split()[:1] == ["esac"]:
            self._blocks.pop()
            return ""
        found = _PATTERN.match(text)
        if found is None:
            return ""
        subject = block.subject or ""
        patterns = [self._expand(part).strip("\"' ") for part in found.group(1).split("|")]
        matches = any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
        is_open = "$" in subject and patterns != ["*"]
        block.take(None if is_open else matches)
        block.in_clause = True
        return self.enter(found.group(2))

    def _truth(self, condition: str) -> bool | None:
        """Whether a comparison of two known words holds; None for any other condition."""
        found = _TEST.fullmatch(condition.strip())
        if found is None:
            return None
        left, right = (self._expand(found.group(part)).strip("\"'") for part in (1, 3))
        if "$" in left + right:
            return None
        sign = found.group(2)
        if sign in _NUMBERS:
            whole = left.isdecimal() and right.isdecimal()
            return _NUMBERS[sign](int(left), int(right)) if whole else None
        is_equal = fnmatch.fnmatchcase(left, right)
        return not is_equal if sign == "!=" else is_equal
