"""The page of `plait explain --html`: a stepper over the recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.trace.page import Card, Drawing, PageSection, Spot, Top, page
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.explain.explanation import Explanation


def html(explanation: Explanation) -> str:
    """The whole page."""
    from plait.explain.text import tokens
    from plait.explore.html import STEPPER, drawing

    record = explanation.as_dict()
    data = steps_of(explanation, record)
    sentences = [f"{number}. {step['sentence']}" for number, step in enumerate(data["steps"], 1)]
    counted = [
        f"{op}: {total['num']} times, {total['bytes']} bytes, as the ledgers of the run counted"
        for op, total in record["counted"].items()
    ]
    routed = [f"rank {one['rank']}: {tokens(one)}" for one in explanation.routing]
    sections = [
        PageSection("Step by step", (Spot("stepper", sentences),)),
        *([PageSection("Tokens and their experts, with weights", routed)] if routed else []),
        PageSection("Formula and paper", (record["formula"], record["paper"])),
        PageSection("The case", (record["case"],)),
        PageSection("What was sent", counted or ("Nothing was sent.",)),
    ]
    cards = (
        Card("plan", record["plan"]),
        Card("ranks", str(record["ranks"])),
        Card("steps", str(len(data["steps"]))),
        Card("sent in all", f"{sum(one['bytes'] for one in record['counted'].values())} bytes"),
    )
    title = f"{explanation.term}: {record['title']}"
    return page(title, sections, Top(record["idea"], cards), Drawing(*drawing(data, STEPPER)))


def steps_of(explanation: Explanation, record: JsonObject) -> JsonObject:
    """The data of the stepper: each step with its sentence, and what each rank has in it."""
    from plait.explain.words import sentence

    told = [sentence(step) for step in explanation.steps]
    steps = [{**step, "sentence": text} for step, text in zip(record["steps"], told, strict=True)]
    return {"ranks": record["ranks"], "steps": steps}
