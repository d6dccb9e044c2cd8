"""The page of `plait schedule --html`: what a schedule holds and wastes, and its timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from plait.errors import ScheduleError
from plait.parallel.pipeline import render
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.schedules import SCHEDULES, make
from plait.parallel.pipeline.simulate import Simulation, simulate
from plait.trace.drawn import drawn_timeline
from plait.trace.page import Card, Drawing, Grid, PageSection, Picture, Spot, Top, page

LEAST = 0.005
"""A bubble that is not worth a word."""
MOST_TRIED = 2000
"""Stages times micro-batches of schedules that are simulated for the advice."""


def html(schedule: Schedule, result: Simulation) -> str:
    """The whole page; `result` is the schedule's simulation, where an action's unit is a slot."""
    from plait.explore.html import drawing

    rows = tuple(
        (str(stage), f"{live:g}", f"{versions:g}", f"{stale:g}")
        for stage, (live, versions, stale) in enumerate(
            zip(result.peak_activations, result.weight_versions, result.staleness, strict=True)
        )
    )
    head = ("stage", "live micro-batches", "weight versions", "staleness")
    advice = list(proposals(schedule, result))
    sections = [
        PageSection("Timeline", (Spot("timelines", (Picture(render.svg(schedule)),)),)),
        *([PageSection("What limits it, and what to try next", advice)] if advice else []),
        PageSection("Stages", (Grid(head, rows),)),
    ]
    drawn = drawn_timeline(result.timeline, f"{schedule.name}, in slots", seconds="slots")
    script = Drawing(*drawing({"unit": "slots", "timelines": [drawn]}))
    return page(f"plait schedule: {schedule.name}", sections, top(schedule, result), script)


def top(schedule: Schedule, result: Simulation) -> Top:
    """The schedule in one sentence, and its numbers."""
    fullest = max(result.peak_activations_per_rank)
    lead = (
        f"{schedule.name} on {schedule.num_ranks} ranks with {schedule.num_micro_batches} "
        f"micro-batches: a rank stands idle for {result.bubble_fraction:.1%} of a step, and the "
        f"fullest holds the activations of {fullest:g} micro-batches."
    )
    cards = (
        Card("bubble", f"{result.bubble_fraction:.1%}", "idle time of a step"),
        Card("with a barrier", f"{result.barrier_bubble_fraction:.1%}", "after each step"),
        Card("live activations", f"{fullest:g}", "micro-batches, fullest rank"),
        Card("weight versions", f"{max(result.weight_versions):g}", "of the fullest stage"),
        Card("staleness", f"{max(result.staleness):g}", "updates, at most"),
    )
    return Top(lead, cards)


def proposals(schedule: Schedule, result: Simulation) -> Iterator[str]:
    """Sentences on what would leave the ranks less idle; none for a schedule of one's own."""
    name = schedule.name.partition(",")[0]
    stages = schedule.num_ranks
    count = schedule.num_micro_batches
    if name not in SCHEDULES or stages == 1 or stages * count > MOST_TRIED:
        return
    if schedule.asynchronous:
        yield "An asynchronous schedule never drains: it pays with stale weights, not idle time."
        return
    if result.bubble_fraction < LEAST:
        yield "The ranks never stand idle, unless they wait for each other after each step."
        return
    bubble_of = {name: result.bubble_fraction}
    for other, facts in SCHEDULES.items():
        divides = not facts.facts.needs_virtual or count % stages == 0
        if facts.facts.asynchronous or not divides or other == name:
            continue
        with suppress(ScheduleError):  # of fewer micro-batches than it needs
            bubble_of[other] = simulate(make(other, stages, count, 0)).bubble_fraction
    best = min(bubble_of, key=lambda one: bubble_of[one])
    if bubble_of[best] < result.bubble_fraction - LEAST:
        yield f"{best} would leave a rank idle for {bubble_of[best]:.1%} of a step instead."
    virtual = schedule.num_stages // stages if SCHEDULES[name].facts.needs_virtual else 0
    more = simulate(make(name, stages, 2 * count, virtual)).bubble_fraction
    yield f"With {2 * count} micro-batches a step, {name} would leave it idle for {more:.1%}."
