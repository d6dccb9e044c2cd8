"""argparse, with errors that are raised instead of printed, and that name the nearest option."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from plait.cli.streams import say
from plait.errors import PlaitError, nearest

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

WRONG_VALUE = re.compile(r"argument ([^:]*): invalid (\w+)(?: value)?: (.*)", re.S)
"""argparse's message on a value that is no number, or none of the choices."""
NUMBERS = {"int": "a whole number", "float": "a number"}


class UsageError(PlaitError):
    """A command line that cannot be read."""


class Help(argparse.HelpFormatter):
    """No breaks within words: `megatron-lm` is one name."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """No abbreviations: a shortened option would change its meaning when a longer one is added."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=Help,
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving.

        Raises:
            UsageError: always, with the message.
        """
        raise UsageError(f"{_plain(message)}; see {self.prog} --help")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help on stdout, whose reader may have left."""
        if file is None:
            say(self.format_help(), sys.stdout)
        else:
            super().print_help(file)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options. Errors: `UsageError` naming the option nearest to an unknown one."""
        if any("\0" in word for word in words):
            raise UsageError(f"a word has a null character in it; see {self.prog} --help")
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            self._refuse(unknown[0])
        return arguments

    def _refuse(self, word: str) -> NoReturn:
        known = [
            option
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        ]
        if not word.startswith("-"):
            cure = f"see {self.prog} --help"
            if "=" in word and "--set" in known:
                cure = f"a key of the config is set by --set {word}"
            raise UsageError(f"'{word}' is one argument too many; {cure}")
        raise UsageError(
            f"unknown option {word.partition('=')[0]}; {nearest(word.partition('=')[0], known)}"
        )


def _plain(message: str) -> str:
    """A message of argparse without its own words.

    >>> _plain("argument --gpus: invalid int value: 'many'")
    "--gpus must be a whole number, not 'many'"
    """
    found = WRONG_VALUE.fullmatch(message)
    if found is None:
        return message
    option, kind, value = found.groups()
    if kind == "choice":
        given, _, choices = value.partition(" (choose from ")
        return f"{option} must be one of {choices.removesuffix(')')}, not {given}"
    return f"{option} must be {NUMBERS[kind]}, not {value}" if kind in NUMBERS else message
