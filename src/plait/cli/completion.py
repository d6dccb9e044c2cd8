"""`plait --completion SHELL`: a script by which a shell completes verbs, options and words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from plait.cli import table
from plait.cli.parser import Parser, UsageError
from plait.errors import nearest


@dataclass(frozen=True)
class CompletedOption:
    """One option: its name, the words that may follow, and its help."""

    name: str
    words: tuple[str, ...]
    help: str


def script(shell: str) -> str:
    """The script for one shell. Errors: `UsageError` for a shell without one."""
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for '{shell}'; {nearest(shell, SHELLS)}")
    return SHELLS[shell]()


def options(verb: str) -> Iterator[CompletedOption]:
    """The options of a verb, those of all verbs included."""
    parser = Parser(f"plait {verb}", "")
    table.load(verb).add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                yield CompletedOption(name, _words(action), action.help or "")


def _words(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices or ()))


def _bash() -> str:
    names = []
    words = []
    for verb in table.VERBS:
        known = list(options(verb))
        names.append(f'    {verb}) names="{" ".join(one.name for one in known)}" ;;')
        words += [
            f'    "{verb} {one.name}") words="{" ".join(one.words)}" ;;'
            for one in known
            if one.words
        ]
    return "\n".join(
        [
            "_plait() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" names="" words=""',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    names="{" ".join(table.VERBS)} --help --version --completion"',
            '    COMPREPLY=($(compgen -W "$names" -- "$word"))',
            "    return",
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *names,
            "  esac",
            '  case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
            *words,
            f'    "--completion --completion") words="{" ".join(SHELLS)}" ;;',
            "  esac",
            '  if [ -n "$words" ]; then',
            '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  elif [[ "$word" == -* ]]; then',
            '    COMPREPLY=($(compgen -W "$names" -- "$word"))',
            "  else",
            "    COMPREPLY=()",
            "  fi",
            "}",
            "complete -o default -F _plait plait",
        ]
    )


def _zsh() -> str:
    loaded = ("compinit", "bashcompinit")
    first = "".join(f"autoload -U +X {name} && {name}\n" for name in loaded)
    return first + _bash()


def _fish() -> str:
    lines = []
    for verb, what in table.VERBS.items():
        lines.append(f"complete -c plait -n __fish_use_subcommand -a {verb} -d {_quoted(what)}")
        seen = f'"__fish_seen_subcommand_from {verb}"'
        for one in options(verb):
            line = f"complete -c plait -n {seen} -l {one.name[2:]} -d {_quoted(one.help)}"
            if one.words:
                line += f" -x -a {_quoted(' '.join(one.words))}"
            lines.append(line)
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Final[dict[str, Callable[[], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
