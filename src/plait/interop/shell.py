"""The options that a shell script gives to a program."""

from __future__ import annotations

import math
import re
import shlex
from typing import Final

from plait.interop.branches import Branches, statements_of
from plait.interop.source import Undecided
from plait.values import JsonObject, JsonValue

_ASSIGNMENT: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_OPTION: Final = re.compile(r"--[A-Za-z][\w.-]*(=.*)?$", re.DOTALL)
_ARRAY: Final = re.compile(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(")
_ONE_WORD: Final = re.compile(r"\$\(\(.*\)\)|[\"']?\S*[\"']?")
_QUOTED_OPTIONS: Final = re.compile(r"(?=.*\s)(.*\s)?--[A-Za-z]", re.DOTALL)
_END: Final = "\n"
"""The word that ends a command."""
_PRODUCT: Final = re.compile(r"\$\(\(\s*(\w+)\s*\*\s*(\w+)\s*\)\)")
_MAX_EXPANSIONS: Final = 8


def command_line(text: str) -> JsonObject:
    """The options of a shell script or a command line: `--name value ...` as {name: value}.

    Variables that the script sets are put in. An option without a value is True, several values are
    a list. An option given twice keeps its last value, as argparse does. A command ends with its
    line. An array or a quoted text ends with its last mark. What follows is no value. A branch that
    does not run gives nothing. Where its condition is open, its options are `Undecided`.
    """
    variables, words, doubtful = _read(text)
    options: JsonObject = {}
    ranks = re.search(r"^\s*#\s*WORLD_SIZE=(\d+)", text, re.MULTILINE)
    if ranks:
        variables["WORLD_SIZE"] = ranks.group(1)
    if "WORLD_SIZE" in variables:
        options["WORLD_SIZE"] = variables["WORLD_SIZE"]
    options |= _options(words)
    for name, value in _options(doubtful).items():
        if options.get(name) != value:
            options[name] = Undecided(value)
    return options


def _read(text: str) -> tuple[dict[str, str], list[str], list[str]]:
    """The variables of a script, the words of its commands, and those of branches that may run."""
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    variables: dict[str, str] = {}
    words: list[str] = []
    doubtful: list[str] = []
    bares = [_without_comment(line) for line in lines]
    is_script = not "".join(bares).lstrip().startswith("--")
    mark = ""
    branches = Branches(lambda said: _expanded(said, variables))
    for bare in bares:
        for statement in [bare] if mark else statements_of(bare):
            said = statement if mark else branches.enter(statement)
            assigned = _ASSIGNMENT.match(said)
            value = assigned.group(2).strip() if assigned else ""
            if assigned and "--" not in value and _ONE_WORD.fullmatch(value):
                name = assigned.group(1)
                if branches.runs:
                    variables[name] = _expanded(value.strip("\"'"), variables)
                elif branches.runs is None:  # its value is known to the shell alone
                    variables[name] = f"${name}"
                continue
            mark = _mark_after(said, mark)
            if branches.runs is False:
                continue
            said = re.sub(r"^\s*(?:export\s+)?[A-Za-z_]\w*\+?=\(?", " ", said)
            kept = words if branches.runs else doubtful
            kept += _split(_expanded(said, variables))
            if is_script and not mark:
                kept.append(_END)
    return variables, words, doubtful


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
