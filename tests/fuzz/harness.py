"""One input after another through the command line's own entry, in this process.

What would start ranks ends at that door: the input was accepted then.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from unittest import mock

from plait.cli import entry
from plait.errors import PlaitError
from tests.fuzz.bench import Bench
from tests.fuzz.inputs import KINDS

LIMIT_SECONDS = 20.0
COLUMNS = ("inputs", "refused", "accepted", "internal errors", "over 20 s")


class Started(PlaitError):
    """The input got as far as the start of ranks."""


class TooSlowError(BaseException):
    """Nobody catches it on its way up."""


@dataclass
class Result:
    """The table, and each input that had an internal error or no answer in time."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def total(self, column: str) -> int:
        """The sum of a column over all kinds."""
        return sum(counter[column] for counter in self.counts.values())

    def table(self) -> str:
        """A line a kind of input."""
        lines = [f"{'':<24}" + "".join(f"{name:>17}" for name in COLUMNS)]
        for kind, counter in [*self.counts.items(), ("all", None)]:
            row = [self.total(name) if counter is None else counter[name] for name in COLUMNS]
            lines.append(f"{kind:<24}" + "".join(f"{number:>17}" for number in row))
        return "\n".join(lines)


def fuzz(inputs: int, seed: int, folder: Path, kinds: tuple[str, ...] = ()) -> Result:
    """So many inputs, the kinds in turn; number and seed say each input exactly."""
    bench = Bench(folder)
    chosen = {name: KINDS[name] for name in (kinds or KINDS)}
    result = Result({name: Counter() for name in chosen})
    names = list(chosen)
    with _closed_doors():
        for number in range(inputs):
            name = names[number % len(names)]
            random = Random(f"{seed}/{number}/{name}")
            words = chosen[name](random, bench)
            outcome = _answered(words)
            _count(result, name, f"{seed}/{number}", words, outcome)
    return result


def _count(result: Result, kind: str, number: str, words: list[str], outcome: Any) -> None:
    column, seconds, report = outcome
    counter = result.counts[kind]
    counter["inputs"] += 1
    counter[column] += 1
    if seconds > result.slowest[0]:
        result.slowest = (seconds, f"{kind} {number}")
    if column in ("internal errors", "over 20 s"):
        shown = " ".join(word[:200] for word in words)
        result.faults.append({"kind": kind, "input": number, "words": shown, "report": report})


def _answered(words: list[str]) -> tuple[str, float, str]:
    """The column, the seconds, and the traceback of what was no sentence."""
    seen: list[Exception] = []
    report = entry._report

    def watched(error: Exception, verb: str, json_to: Any) -> int:
        seen.append(error)
        return report(error, verb, json_to)

    begun = time.monotonic()
    output = io.StringIO()
    with (
        mock.patch.object(entry, "_report", watched),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with _limit():
                code = entry.main(words)
        except TooSlowError:
            where = "".join(traceback.format_exc(limit=-6))
            return "over 20 s", LIMIT_SECONDS, where
        except Exception:
            return "internal errors", time.monotonic() - begun, traceback.format_exc(limit=-8)
    seconds = time.monotonic() - begun
    return _row(seen, code, output.getvalue(), seconds)


def _row(seen: list[Exception], code: int, text: str, seconds: float) -> tuple[str, float, str]:
    if seen and isinstance(seen[0], Started):
        return "accepted", seconds, ""
    if seen and not isinstance(seen[0], PlaitError):
        error = seen[0]
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return "internal errors", seconds, "".join(lines)[-2500:]
    if "Traceback (most recent call last)" in text or code not in (0, 1, 2):
        return "internal errors", seconds, f"exit code {code}: {text[-2500:]}"
    return ("refused" if code == 2 else "accepted"), seconds, ""


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def ring(number: int, frame: object) -> NoReturn:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _closed_doors() -> Iterator[None]:
    """No rank is started and no machine is measured."""

    def started(*words: object, **more: object) -> NoReturn:
        raise Started("ranks would have been started")

    import plait.cli.federated
    import plait.cli.train
    import plait.predict.probe.measure

    doors: list[tuple[Any, str, Callable[..., Any]]] = [
        (plait.cli.train, "launch", started),
        (plait.cli.federated, "launch", started),
        (plait.predict.probe.measure, "launch", started),
        (importlib.import_module("plait.verify.run"), "run", started),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, door in doors:
            stack.enter_context(mock.patch.object(module, name, door))
        yield


def as_json(result: Result) -> str:
    """The totals and the faults, for the test that reads them."""
    totals = {name: result.total(name) for name in COLUMNS}
    kinds = {kind: dict(counter) for kind, counter in result.counts.items()}
    return json.dumps({**totals, "kinds": kinds, "faults": result.faults})
