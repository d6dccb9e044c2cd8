"""Whether a step is random: it differs from itself, so that no other run can equal it.

One device runs twice from the same seeds, then from others. A step that draws numbers is no wrong
step. The finding says what draws them and how to seed it, and no axis is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from plait.verify.diagnosis.finding import Finding
from plait.verify.record.compare import Difference, differences
from plait.verify.record.observation import Record
from plait.verify.reference.drawn import all_from
from plait.verify.report import Report

CAUSE = "random"
SEEDS = (1, 2, 3, 4)
ROOM = 10.0  # a run is as far from one device as this many times one device from itself
OF_GRADIENTS = ("scale", "param", "update")  # kinds that are as far apart as gradients are
OWN = (
    "from the same seeds of torch, random and numpy: it has a generator of its own, reads the "
    "clock, or runs an operation that is not deterministic. Draw the numbers in make() and hand "
    "them over with the batch, or make the generator, seeded, right before it draws"
)
CURES = {
    "torch": (
        "draw torch's numbers in make(), some for each sample, and hand them over with the batch, "
        "or set their rate to 0 there"
    ),
    "random": "call random.seed(number) right before they are drawn, alike on every rank",
    "numpy": "call numpy.random.seed(number) right before they are drawn, alike on every rank",
}
SEEN = ("data-split", "data-repeated", "init", "make", "stale-parameters")
"""Causes that were seen in the run itself, whatever it draws."""

Drift = Mapping[str, Difference]
"""The largest difference of each kind between a step and itself."""


def drift(one: Record, other: Record) -> Drift:
    """How far two runs of one step are apart; losses that are not known are not compared."""
    known = (found for found in differences(one, other) if found.kind != "loss" or _knows(one))
    return _largest(known)


def _knows(record: Record) -> bool:
    return all(math.isfinite(step.loss) for step in record.steps)


def largest_of(drifts: Iterable[Drift]) -> Drift:
    """The largest of several."""
    return _largest(found for each in drifts for found in each.values())


def _largest(found: Iterable[Difference]) -> Drift:
    most: dict[str, Difference] = {}
    for one in found:
        if one.kind not in most or one.error > most[one.kind].error:
            most[one.kind] = one
    return most


def with_chance(
    report: Report, run: Callable[[], Record], in_a_row: Callable[[], Record] | None = None
) -> Report:
    """A report of no, with what one device's `run` says of itself.

    Where it is random its difference replaces the causes that it explains. `in_a_row` does one step
    twice without an update.
    """
    if report.ok or report.refusals:
        return report
    first = _run_from(0, run)
    own = drift(_run_from(0, run), first)
    if _is_more(own, report):
        return told(report, own, f"one device differs from itself by {{}}, {OWN}")
    others = _from_others(run, first)
    if _is_more(others, report):
        drawn = [name for name in CURES if _is_more(_from_others(run, first, name), report)]
        return of_draws(report, others, "one device differs from itself", drawn)
    if in_a_row is None:
        return report
    own = _in_a_row(_run_from(0, in_a_row))
    if not _is_more(own, report):
        return report
    return told(report, own, f"one device does it twice, and differs by {{}}, {OWN}")


def of_draws(report: Report, found: Drift, who: str, drawn: Sequence[str]) -> Report:
    """A report with the finding that a step draws numbers from these generators."""
    if not drawn or not _is_more(found, report):
        return report  # none of the three, or nothing that shows
    cures = "; ".join(CURES[name] for name in drawn)
    return told(
        report, found, f"{who} by {{}} from other seeds, as it draws from {_listed(drawn)}: {cures}"
    )


def told(report: Report, found: Drift, text: str) -> Report:
    """A report with the sentence, in place of the findings where chance explains all errors."""
    worst = max(found.values(), key=lambda one: one.error)
    where = f"{worst.error:.3g} ({worst.kind} {worst.name} in step {worst.step})"
    what = f"the step is random: {text.format(where)}"
    if not _explains(found, report):
        more = f"{what}; this does not explain all of the difference"
        return replace(report, findings=[*report.findings, Finding(CAUSE, "", more, 0.6)])
    kept = [one for one in report.findings if one.cause in SEEN]
    return replace(report, findings=[*kept, Finding(CAUSE, "", what, 0.99)], modules=())


def _in_a_row(record: Record) -> Drift:
    """How far apart two steps with the same weights and buffers are; nothing where one moved."""
    one, other = record.steps
    moved = any(
        not torch.equal(value, other.params[name]) for name, value in one.params.items()
    ) or any(not torch.equal(value, other.buffers[name]) for name, value in one.buffers.items())
    found = {} if moved else drift(Record(None, [other]), Record(None, [one]))
    return {kind: one for kind, one in found.items() if kind not in OF_GRADIENTS}


def _from_others(run: Callable[[], Record], first: Record, only: str = "") -> Drift:
    """How far runs from other seeds are from the first; from those of one generator with `only`."""
    return largest_of(drift(_run_from(seed, run, only), first) for seed in SEEDS)


def _run_from(seed: int, run: Callable[[], Record], only: str = "") -> Record:
    with all_from(seed, only):
        return run()


def _is_more(found: Drift, report: Report) -> bool:
    """Whether a step differs from itself by more than passes."""
    return any(one.error > report.limit(one.kind) for one in found.values())


def _explains(found: Drift, report: Report) -> bool:
    known = {kind: one.error for kind, one in found.items()}
    known = dict.fromkeys(OF_GRADIENTS, known.get("grad", 0.0)) | known
    return all(one.error <= ROOM * known.get(one.kind, 0.0) for one in report.failed)


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if names[1:] else names)
