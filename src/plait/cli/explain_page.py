"""The page of `plait explain --html`: a stepper over the recorded steps, and beside it all that
the terminal tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from plait.trace.page import Card, Drawing, PageSection, Picture, Spot, Top, page
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.explain.explanation import Explanation


def html(explanation: Explanation) -> str:
    """The whole page."""
    from plait.explain.text import NAMES, after, held, tokens
    from plait.explore.html import STEPPER, drawing

    record = explanation.as_dict()
    data = steps_of(explanation, record)
    sentences = [f"{number}. {step['sentence']}" for number, step in enumerate(data["steps"], 1)]
    counted = [
        f"{op}: {total['num']} times, {total['bytes']} bytes, as the ledgers of the run counted"
        for op, total in record["counted"].items()
    ]
    routed = [f"rank {one['rank']}: {tokens(one)}" for one in explanation.routing]
    schedule = list(_schedule(explanation))
    times = "one update" if explanation.case.num_steps == 1 else "the last update"
    sections = [
        PageSection("Step by step", (Spot("stepper", sentences),)),
        *schedule,
        *([PageSection("Tokens and their experts, with weights", routed)] if routed else []),
        PageSection("Formula and paper", (record["formula"], record["paper"])),
        PageSection("The case", (f"{record['case']}. {NAMES}",)),
        PageSection("Who holds what", by_rank(held(explanation))),
        PageSection("What was sent", counted or ("Nothing was sent.",)),
        PageSection(f"Weights after {times}, where they are updated", by_rank(after(explanation))),
    ]
    cards = (
        Card("plan", record["plan"]),
        Card("ranks", str(record["ranks"])),
        Card("steps", str(len(data["steps"]))),
        Card("sent in all", f"{sum(one['bytes'] for one in record['counted'].values())} bytes"),
    )
    title = f"{explanation.term}: {record['title']}"
    scripts = ("timeline.js", "report.js", *STEPPER) if schedule else STEPPER
    drawn = Drawing(*drawing({**data, **_timeline(explanation)}, scripts))
    return page(title, sections, Top(record["idea"], cards), drawn)


def by_rank(texts: Sequence[str]) -> list[str]:
    """A sentence for each rank, or one for all where they are alike."""
    if len(set(texts)) == 1 and len(texts) > 1:
        return [f"each rank: {texts[0]}"]
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts)]


def _schedule(explanation: Explanation) -> Iterator[PageSection]:
    """The actions that the ranks of a pipeline have walked, as a timeline; none without one."""
    from plait.parallel.pipeline import render

    schedule, simulation = explanation.schedule, explanation.simulation
    if schedule is None or simulation is None:
        return
    live = " ".join(map(str, simulation.peak_activations))
    versions = " ".join(map(str, simulation.weight_versions))
    numbers = (
        f"A rank stands idle for {simulation.bubble_fraction:.1%} of the time. Micro-batches whose "
        f"activations are kept, by stage: at most {live}. Versions of the weights, by stage: "
        f"{versions}."
    )
    drawn = Spot("timelines", (Picture(render.svg(schedule)),))
    yield PageSection("The schedule, from the actions that the ranks have walked", (drawn, numbers))


def _timeline(explanation: Explanation) -> JsonObject:
    """The data of the schedule's timeline, where an action's unit is a slot."""
    from plait.trace.drawn import drawn_timeline

    schedule, simulation = explanation.schedule, explanation.simulation
    if schedule is None or simulation is None:
        return {}
    drawn = drawn_timeline(simulation.timeline, f"{schedule.name}, in slots", seconds="slots")
    return {"unit": "slots", "timelines": [drawn]}


def steps_of(explanation: Explanation, record: JsonObject) -> JsonObject:
    """The data of the stepper: each step with its sentence, and what each rank has in it."""
    from plait.explain.words import sentence

    told = [sentence(step) for step in explanation.steps]
    steps = [{**step, "sentence": text} for step, text in zip(record["steps"], told, strict=True)]
    return {"ranks": record["ranks"], "steps": steps}
