"""`main`, the one entry: words in, exit code out. The only place of the command line that prints a
result or an error.

Exit codes: 0 done, 1 the answer is no or the run failed, 2 bad input, 130 interrupted by a user.
143 and 138 say that SIGTERM or SIGUSR1 ended a training after a save.
With `--json` there is one object on stdout, and everything else goes to stderr. The object is
`{"error": ..., "kind": ...}` after a failure; after a signal the kind is its name. A verb that
serves prints `{"url": ...}` first. Of the ranks of torchrun only the main process prints an object.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

import plait
import plait.launcher.lean  # before torch
from plait.cli import table
from plait.cli.answer import Answer, to_json
from plait.cli.limits import explained
from plait.cli.parser import Parser, UsageError
from plait.cli.streams import (
    DrawnText,
    StdoutError,
    complain,
    escape_unknown,
    open_closed,
    say,
    settle,
)
from plait.errors import PlaitError, WorldSizeError
from plait.launcher import JoinedWorld, joined_world
from plait.launcher.hearing import BEGINNING, load_torch_uninterrupted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERRUPTED = 130
SIGNALLED = {128 + number: number.name for number in signal.Signals}
"""The exit codes that name a signal."""

load_torch_uninterrupted()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; `argv` without the program's name, by default that of this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help", "--version"):
        return _said(f"plait {plait.__version__}" if words[:1] == ["--version"] else _help())
    with _own_stdout() if "--json" in words else contextlib.nullcontext() as json_to:
        return _answered(words, json_to)


def command() -> NoReturn:
    """The program: `main`, and the end of this process.

    A rank of torchrun leaves at once, as those of plait's own launcher do. The interpreter's end
    takes a while, and may fail where native threads are left. To its agent a rank that has done
    its work would then still be at work, or lost.

    After Ctrl-C this process ends itself, too. Where SIGINT came inside of an `exec`, as
    dataclasses use it, `python -m` ends by that signal, whatever its exit code.
    """
    open_closed()
    escape_unknown()
    code = main()
    if code == INTERRUPTED:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        settle(stream)
    if code != INTERRUPTED and _told_world() is None:
        sys.exit(code)
    os._exit(code)


def _said(text: str) -> int:
    """Print what needs no verb, and return the exit code."""
    try:
        say(f"{text}\n", sys.stdout)
    except StdoutError as error:
        return _report(error, "", None)
    return 0


def _answered(words: list[str], json_to: TextIO | None) -> int:
    awaiting = json_to  # who has no object yet
    try:
        answer = _run(words)
        _print(answer, json_to)
        awaiting = None
        while answer.serve is not None:
            following = answer.serve()
            if following is None:
                break
            answer = following
            _print(answer, json_to)
    except SystemExit as end:  # argparse's --help, and a signal that ended a launch or a server
        code = end.code if isinstance(end.code, int) else 0
        if code in SIGNALLED:
            name = SIGNALLED[code]
            _print_failure(f"ended by {name}, as stderr says", name, awaiting)
        return code
    except KeyboardInterrupt:
        complain("plait: stopped by Ctrl-C")
        _print_failure("stopped by Ctrl-C", "SIGINT", awaiting)
        return INTERRUPTED
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        return _report(error, words[0], json_to)
    return 0 if answer.ok else 1


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """The real stdout for the one object. Everything else that is written to it, also by ranks and
    native code, goes to stderr.
    """
    try:
        is_real = sys.stdout.fileno() == 1
    except (OSError, AttributeError):  # replaced by something in memory
        is_real = False
    if not is_real:
        stdout = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            settle(sys.stdout)
            os.dup2(stdout.fileno(), 1)


def _run(words: list[str]) -> Answer:
    name = words[0]
    if name == "--completion":
        return _completion(words[1:])
    if name.startswith("-"):
        raise UsageError(
            f"the verb comes first, before {name}: plait VERB {name}; plait --help lists the verbs"
        )
    if name == "train" and _told_world() is None:
        with BEGINNING.heard():
            return _verb(name, words)
    return _verb(name, words)


def _verb(name: str, words: list[str]) -> Answer:
    verb = table.load(name)
    parser = Parser(f"plait {name}", table.VERBS[name])
    verb.add_arguments(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on stdout and nothing else there",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return verb.run(parser.parse(words[1:]))


def _completion(words: list[str]) -> Answer:
    from rich.text import Text

    from plait.cli.completion import SHELLS, script

    parser = Parser("plait", table.COMPLETION)
    parser.add_argument("--completion", metavar="|".join(SHELLS), required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    made = script(parser.parse(["--completion", *words]).completion)
    return Answer({"script": made}, Text(made))


def _print(answer: Answer, json_to: TextIO | None) -> None:
    world = _told_world() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if world is not None and world.rank != 0:  # the ranks of torchrun have the same answer
        return
    if json_to is not None:
        if answer.data is not None:
            say(f"{to_json(answer.data)}\n", json_to)
        return
    view = answer.shown()
    if view is not None:
        from rich.console import Console

        page = DrawnText()
        show(view, Console(file=page, highlight=False))
        say(page.getvalue(), sys.stdout)


def show(view: RenderableType, console: Console) -> None:
    """Print the view of an answer: running text between words, and `Text`, a file's own, as it
    is.
    """
    from rich.text import Text

    from plait.cli.layout import Prose

    if isinstance(view, str):
        view = Prose(view)
    console.print(view, crop=False, soft_wrap=isinstance(view, Text))


def _report(error: Exception, verb: str, json_to: TextIO | None) -> int:
    """Print one message and return the exit code; an error that is not the user's says where it
    comes from.
    """
    error = explained(error)
    if isinstance(error, PlaitError):
        message = str(error)
        code = error.exit_code
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        message = f"{type(error).__name__}: {error} (at {where}; --debug shows the whole traceback)"
        code = 1
    who = f"plait {verb}" if verb in table.VERBS else "plait"
    world = _told_world()  # torchrun starts one command a rank, and each of them speaks of itself
    complain(f"{who}{f' (rank {world.rank})' if world else ''}: {message}")
    _print_failure(message, type(error).__name__, json_to)
    return code


def _print_failure(message: str, kind: str, json_to: TextIO | None) -> None:
    """Print the object of a failure, where one is asked for and this is the main process."""
    world = _told_world()
    if json_to is not None and (world is None or world.rank == 0):
        with contextlib.suppress(StdoutError):  # stderr has said why
            say(f"{to_json({'error': message, 'kind': kind})}\n", json_to)


def _told_world() -> JoinedWorld | None:
    """The world of this process; None also where its variables are wrong, which has been said."""
    try:
        return joined_world()
    except WorldSizeError:
        return None


def _help() -> str:
    width = max(map(len, table.VERBS))
    rows = [f"  {verb:<{width}}  {summary}" for verb, summary in table.VERBS.items()]
    return "\n".join(
        [
            "plait: every way to parallelise training, woven into one run.",
            "",
            "usage: plait VERB ... [--json] [--debug]      plait VERB --help      plait --version",
            "",
            *rows,
            "",
            f"plait --completion bash|zsh|fish: {table.COMPLETION}",
        ]
    )
