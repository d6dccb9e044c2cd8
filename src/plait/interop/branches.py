"""The branches of a shell script: `if`, `case`, `&&`, functions, and which of them run."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_WORD: Final = re.compile(r"(\w+)(?:\s+(.*))?$", re.DOTALL)
_CASE: Final = re.compile(r"case\s+(.+?)\s+in(?:\s+(.*))?$", re.DOTALL)
_PATTERN: Final = re.compile(r"\(?\s*([^()]+?)\s*\)\s*(.*)$", re.DOTALL)
_TEST: Final = re.compile(r"\[\[?\s+(\S+)\s+(==?|!=|-eq|-ne|-lt|-le|-gt|-ge)\s+(\S+)\s+\]\]?")
_GUARD: Final = re.compile(r"\s*(\[\[?\s.*?\s\]\]?|\(\(.*?\)\))\s*(&&|\|\|)\s*(.*)$", re.DOTALL)
_FUNCTION: Final = re.compile(
    r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*\{(?:\s(.*))?$", re.DOTALL
)
_GROUP: Final = re.compile(r"(.*?(?:&&|\|\|))?\s*\{(?:\s(.*))?$", re.DOTALL)
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


def both(one: bool | None, other: bool | None) -> bool | None:
    """Whether both hold; None where that is open."""
    return False if False in (one, other) else None if None in (one, other) else True


@dataclass
class _Fork:
    """An `if` with its branches, a `case` of a subject, or a function."""

    end: str
    """The word that ends it."""
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

    def __init__(self, expand: Callable[[str], str], text: str) -> None:
        """`expand` puts the values of variables into a text. `text` is the whole script."""
        self._expand = expand
        self._text = text
        self._blocks: list[_Fork] = []

    @property
    def runs(self) -> bool | None:
        """Whether the present statement runs; None where a condition is open."""
        runs: bool | None = True
        for block in self._blocks:
            runs = both(runs, block.runs)
        return runs

    def close(self) -> None:
        """Raises `ValueError` at the end of a script with a block that has no end."""
        if self._blocks:
            raise ValueError(f"a block has no `{self._blocks[-1].end}`")

    def guarded(self, statement: str) -> list[tuple[bool | None, str]]:
        """The parts of `test && part || part`, and whether each runs."""
        found = _GUARD.match(statement)
        if found is None:
            return [(True, statement)]
        holds = self._truth(found.group(1))
        fails = None if holds is None else not holds
        if found.group(2) == "||":
            holds, fails = fails, holds
        first, _, second = found.group(3).partition("||")
        parts = [(both(holds, truth), part) for truth, part in self.guarded(first)]
        return [*parts, (fails, second)] if second else parts

    def enter(self, statement: str) -> str:
        """The part of a statement that runs, beside opening a branch or ending a block."""
        text = statement.strip()
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.subject is not None and not block.in_clause:
            return self._clause(block, text)
        if block is not None and block.end == "}" and text[:1] == "}":
            self._blocks.pop()
            return text[1:]
        found = _WORD.match(text)
        word, rest = (found.group(1), found.group(2) or "") if found else ("", "")
        inside = rest if word in ("then", "do") else self._opened(text)
        if inside is not None:
            return self.enter(inside)
        if word == "if" and not rest.endswith(":"):  # a colon: Python's, in a text of the script
            block = _Fork("fi")
            self._blocks.append(block)
        elif block is None or word not in _TURNS:
            if block is not None and text == _END_OF_CLAUSE:
                block.in_clause = False
            return statement
        return self._turn(block, word, rest)

    def _opened(self, text: str) -> str | None:
        """Begin a `case`, a function or a group. What follows is returned; None for others."""
        case = _CASE.match(text)
        if case is not None:
            self._blocks.append(_Fork("esac", self._expand(case.group(1)).strip("\"'")))
            return case.group(2) or ""
        function = _FUNCTION.match(text)
        if function is not None:  # open unless the script names it elsewhere
            name = re.escape(function.group(1) or function.group(2))
            is_called = len(re.findall(rf"(?<![\w-]){name}(?![\w-])", self._text)) > 1
            self._blocks.append(_Fork("}", runs=True if is_called else None))
            return function.group(3) or ""
        group = _GROUP.match(text)
        if group is None:
            return None
        before = group.group(1)
        guarded = self.guarded(f"{before} :")[0]
        is_known = before is None or _GUARD.match(before) is not None
        self._blocks.append(_Fork("}", runs=guarded[0] if is_known else None))
        return group.group(2) or ""

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
