"""The options that a shell script gives to a program."""

from __future__ import annotations

import math
import re
import shlex
from typing import Final

from plait.interop.branches import Branches, both, statements_of
from plait.interop.source import Undecided
from plait.values import JsonObject, JsonValue

_ASSIGNMENT: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_OPTION: Final = re.compile(r"--[A-Za-z][\w.-]*(=.*)?$", re.DOTALL)
_ARRAY: Final = re.compile(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(")
_ONE_WORD: Final = re.compile(r"\$\(\(.*\)\)|[\"']?\S*[\"']?")
_QUOTED_OPTIONS: Final = re.compile(r"(?=.*\s)(.*\s)?--[A-Za-z]", re.DOTALL)
_TEXT: Final = re.compile(r"(?<!<)<<-?\s*[\"']?([A-Za-z_]\w*)")
"""The beginning of a text between two words in a script."""
_RUNS_TEXT: Final = re.compile(r"(?:^|[\s/|])((ba|z|k)?sh|srun|sbatch|qsub|ssh)(?=\s|$)")
_PRINTS: Final = re.compile(r"\s*(?:echo|printf)\b")
_LATE_BRACE: Final = re.compile(r"(\w\s*\(\))\s*\n\s*\{")
_END: Final = "\n"
"""The word that ends a command."""
_PRODUCT: Final = re.compile(r"\$\(\(\s*(\w+)\s*\*\s*(\w+)\s*\)\)")
_MAX_EXPANSIONS: Final = 8


def command_line(text: str) -> JsonObject:
    """The options of a shell script or a command line: `--name value ...` as {name: value}.

    Variables that the script sets are put in. An option without a value is True, several values are
    a list. An option given twice keeps its last value, as argparse does. A command ends with its
    line. An array or a quoted text ends with its last mark. What follows is no value. A branch that
    does not run gives nothing. Where its condition is open, its options are `Undecided`. So are
    those of functions that are not called, and of texts that are printed or written elsewhere.

    Raises:
        ValueError: a block has no end.
    """
    script = _Script(text)
    variables = script.variables
    options: JsonObject = {}
    ranks = re.search(r"^\s*#\s*WORLD_SIZE=(\d+)", text, re.MULTILINE)
    if ranks:
        variables["WORLD_SIZE"] = ranks.group(1)
    if "WORLD_SIZE" in variables:
        options["WORLD_SIZE"] = variables["WORLD_SIZE"]
    options |= _options(script.words)
    for name, value in _options(script.doubtful).items():
        if options.get(name) != value:
            options[name] = Undecided(value)
    for name, value in _options(script.shown).items():
        options.setdefault(name, Undecided(value))
    return options


class _Script:
    """Variables of a script, the words of its commands, and words that may not run."""

    def __init__(self, text: str) -> None:
        """Raises `ValueError` for a block without an end."""
        self.variables: dict[str, str] = {}
        self.words: list[str] = []
        self.doubtful: list[str] = []
        """Words of branches and functions that may run."""
        self.shown: list[str] = []
        """Words of what is printed, or written to another file."""
        self._mark = ""
        self._runs: bool | None = True
        self._is_shown = False
        joined = text.replace("\\\r\n", " ").replace("\\\n", " ")
        lines = _LATE_BRACE.sub(r"\1 {", joined).splitlines()
        bares = [_without_comment(line) for line in lines]
        self._ends = not "".join(bares).lstrip().startswith("--")
        self._branches = Branches(self._expanded, "\n".join(bares))
        end = ""  # of a text in the script that no shell runs
        for bare in bares:
            if end:
                self.shown += [*_split(bare), _END]
                end = "" if bare.strip() == end else end
                continue
            end = "" if self._mark else _end_of_text(bare)
            self._read(bare)
        self._branches.close()

    def _expanded(self, said: str) -> str:
        return _expanded(said, self.variables)

    def _read(self, line: str) -> None:
        if self._mark:
            self._take(line)
            return
        for statement in statements_of(line):
            for truth, part in self._branches.guarded(self._branches.enter(statement)):
                self._runs = both(self._branches.runs, truth)
                self._take(part)

    def _take(self, said: str) -> None:
        """Take a statement, or a line of an array or a quoted text that goes on."""
        assigned = _ASSIGNMENT.match(said)
        value = assigned.group(2).strip() if assigned else ""
        if assigned and "--" not in value and _ONE_WORD.fullmatch(value):
            name = assigned.group(1)
            if self._runs:
                self.variables[name] = self._expanded(value.strip("\"'"))
            elif self._runs is None:  # its value is known to the shell alone
                self.variables[name] = f"${name}"
            return
        if not self._mark:
            self._is_shown = _PRINTS.match(said) is not None
        self._mark = _mark_after(said, self._mark)
        if self._runs is False:
            return
        said = re.sub(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(?", " ", said)
        kept = self.words if self._runs else self.doubtful
        kept = self.shown if self._is_shown else kept
        kept += _split(self._expanded(said))
        if self._ends and not self._mark:
            kept.append(_END)


def _end_of_text(line: str) -> str:
    """The word that ends a text which begins after a line, and which is no script itself."""
    found = _TEXT.search(line)
    if found is None or "((" in line[: found.start()] or _RUNS_TEXT.search(line):
        return ""
    return found.group(1)


def _options(words: list[str]) -> JsonObject:
    """Each option with the words between it and the next one, or the end of its command."""
    options: JsonObject = {}
    index = 0
    while index < len(words):
        word = words[index].strip("()\"'")
        index += 1
        if not _OPTION.match(word):
            continue
        name, equals, joined = word[2:].partition("=")
        values = [joined] if equals else []
        while not equals and index < len(words) and words[index] != _END:
            value = words[index].strip("()\"'")
            if _OPTION.match(value):
                break
            values += [value] if value else []
            index += 1
        options[name.replace("_", "-")] = _value(values)
    return options


def _mark_after(line: str, mark: str) -> str:
    """The mark of an array or a quoted text that is still open after a line: `(`, a quote, or
    nothing. `mark` is the one that was open before it.
    """
    if not mark:
        opened = _ARRAY.match(line)
        mark = "(" if opened else ""
        line = line[opened.end() :] if opened else line
    if mark == "(":
        return "" if line.count(")") > line.count("(") else "("
    quotes = [quote for quote in "\"'" if line.count(quote) % 2]
    if mark:
        return "" if mark in quotes else mark
    return quotes[0] if quotes else ""


def _value(values: list[str]) -> JsonValue:
    stops = ("pretrain", "python", "torchrun", "&", "|", ";", ">", "2>&1")
    unquoted: list[str] = []
    for value in values:
        if value.endswith(".py") or value.startswith(stops):
            break
        unquoted.append(value)
    while len(unquoted) > 1 and unquoted[-1].startswith("$"):
        unquoted.pop()  # a variable that is not set holds no value, or more options
    if not unquoted:
        return True
    return unquoted[0] if len(unquoted) == 1 else unquoted


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _expanded(text: str, variables: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        default = (match.group(2) or "").strip("\"'")
        return variables.get(name, default or match.group(0))

    for _ in range(_MAX_EXPANSIONS):
        again = _VARIABLE.sub(put, text)
        product = _PRODUCT.fullmatch(again)
        if product:
            factors = [variables.get(factor, factor) for factor in product.groups()]
            if all(factor.isdecimal() for factor in factors):
                again = str(math.prod(map(int, factors)))
        if again == text:
            break
        text = again
    return text


def _split(text: str) -> list[str]:
    """The words of a line. A quoted text that holds options is words too."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that ends on another line
        return text.replace('"', " ").replace("'", " ").split()
    return [
        part for word in words for part in (word.split() if _QUOTED_OPTIONS.match(word) else [word])
    ]
