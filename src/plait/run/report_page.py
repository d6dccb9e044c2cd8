"""The page of `plait report`: timelines on one scale, then memory, traffic and the loss, promised
beside measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from plait.doctor import findings
from plait.plan.facts import SCHEDULES
from plait.run.report_troubles import errors_of, findings_of, recoveries_of
from plait.run.rundata import RunData, lines_of
from plait.run.rundir import RunFolder
from plait.trace import Timeline
from plait.trace.bars import Bar, Bars
from plait.trace.drawn import drawn_timeline, laid_over
from plait.trace.page import (
    NO_DRAWING,
    Card,
    Drawing,
    Folded,
    Grid,
    PageSection,
    Picture,
    Spot,
    Top,
    page,
)
from plait.trace.picture import COLOURS, Frame, Lane, lanes, legend, timeline_lanes
from plait.trace.units import milliseconds, percent, size_words
from plait.values import JsonMapping, JsonValue

MAX_LANES = 16
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "REDUCE": "reduce",
    "U": "update",
    "wait": "waiting for a message",
    "other": "transfers and the rest",
}


def report_page(data: RunData, drawing: Drawing = NO_DRAWING, advice: Sequence[str] = ()) -> str:
    """The whole page. `drawing` is the script of `pictures_of(data)`; `advice` says what limits the
    run, and what to try next.
    """
    sections = [
        *([PageSection("What limits this run, and what to try next", advice)] if advice else []),
        *([_timelines(data, data.simulated)] if data.simulated else []),
        _course(data.metrics),
        _memory(data),
        _traffic(data),
        *([_summary(data)] if data.steps else []),
        *recoveries_of(data),
        *findings_of(data),
        *errors_of(data),
    ]
    top = Top(_lead(data), _cards(data))
    return page(f"plait run {data.folder.resolve().name}: {data.plan}", sections, top, drawing)


def pictures_of(data: RunData) -> JsonMapping:
    """The data of the page's curves and timelines."""
    guess = None if data.prediction is None else data.prediction.numbers
    runs = [{"name": str(data.plan), "steps": list(data.metrics), "predicted": guess}]
    return {"runs": runs, "timelines": _drawn_timelines(data, data.simulated)}


def _drawn_timelines(data: RunData, simulated: Timeline | None) -> list[JsonMapping]:
    """The measured timeline above those that were promised; none without traced steps."""
    if simulated is None:
        return []
    line = lines_of(data.plan)
    measured = drawn_timeline(measured_timeline(data), f"measured: {_which_steps(data)}")
    promised = [drawn_timeline(simulated, f"simulated: {OWN_TIMES}", line)]
    word = "simulated"
    if data.prediction is not None:
        promised.insert(0, drawn_timeline(data.prediction.timeline, PREDICTED, line))
        word = "predicted"
    return [laid_over(measured, promised[0], word), *promised]


PREDICTED = "predicted before the run, by the cost model"


def _lead(data: RunData) -> str:
    """One sentence of what happened, and one of what went wrong."""
    summary = data.summary
    first = data.metrics[0]["loss"] if data.metrics else None
    last = summary.get("final_loss")
    course = (
        "" if first is None or last is None else f"; the loss went from {first:.4g} to {last:.4g}"
    )
    text = f"{data.num_steps} steps on {data.plan.world_size} ranks under {data.plan}{course}. "
    if not data.steps:
        return f"{text}A run writes the timeline of its steps when it ends, and this one has not."
    numbers = data.numbers()
    measured = numbers["measured_step_seconds"]
    text += f"The actions of a step took {milliseconds(measured)}"
    predicted = numbers["predicted_step_seconds"]
    if predicted:
        text += f", and {milliseconds(predicted)} were predicted ({measured / predicted - 1:+.0%})"
    text += f"; the ranks stood idle for {percent(numbers['measured_bubble_fraction'])} of it."
    troubles = {
        "recovery": len(summary.get("recoveries") or []),
        "finding of the doctor": len(findings.read(RunFolder(data.folder).doctor)),
    }
    said = [f"{count} x {name}" for name, count in troubles.items() if count]
    return f"{text} {', '.join(said)}: see below." if said else text


def _cards(data: RunData) -> tuple[Card, ...]:
    """The numbers of the run, each with its prediction in small letters."""
    summary = data.summary
    numbers = data.numbers()
    guess = {} if data.prediction is None else data.prediction.numbers

    def predicted(key: str, text: Callable[[float], str]) -> str:
        return f"predicted {text(guess[key])}" if key in guess else ""

    loss = summary.get("final_loss")
    first = data.metrics[0]["loss"] if data.metrics else None
    sent = sum((summary.get("traffic") or {}).values())
    peaks = summary.get("peak_memory")
    memory = f"predicted {size_words(guess['memory']['total'])}" if guess else ""
    traffic = f"predicted {size_words(sum(guess['traffic'].values()))}" if guess else ""
    return (
        Card(
            "loss",
            "-" if loss is None else f"{loss:.4f}",
            "" if first is None else f"from {first:.4f}",
        ),
        Card(
            f"{summary.get('unit') or 'tokens'} a second",
            f"{summary.get('tokens_per_second') or 0:,.0f}",
            predicted("tokens_per_second", lambda value: f"{value:,.0f}"),
        ),
        Card(
            "a step",
            milliseconds(numbers["measured_step_seconds"]),
            predicted("step_seconds", milliseconds),
        ),
        Card(
            "bubble",
            percent(numbers["measured_bubble_fraction"]),
            predicted("bubble_fraction", percent),
        ),
        Card("peak memory", size_words(max(peaks)) if peaks else "-", memory),
        Card("sent by a rank", size_words(sent), traffic),
    )


def _peak_of_training(summary: JsonMapping) -> str:
    """The most that a rank held beyond what it held before its model was made."""
    peaks = summary.get("peak_memory") or []
    before = summary.get("memory_before") or []
    if not peaks or len(before) != len(peaks) or None in before:
        return "-"
    return size_words(max(0, *(peak - held for peak, held in zip(peaks, before, strict=True))))


def measured_timeline(data: RunData) -> Timeline:
    """The steps that are shown: all of a stream, else the one of median length."""
    asynchronous = SCHEDULES[data.plan.pp.schedule].asynchronous
    return Timeline.merge(data.steps.values()) if asynchronous else data.steps[data.shown]


def _which_steps(data: RunData) -> str:
    if SCHEDULES[data.plan.pp.schedule].asynchronous:
        return f"steps {min(data.steps)} to {max(data.steps)}"
    return f"step {data.shown}"


def _summary(data: RunData) -> PageSection:
    numbers = data.numbers()
    summary = data.summary
    rows = [
        (
            "measured",
            milliseconds(numbers["measured_step_seconds"]),
            percent(numbers["measured_bubble_fraction"]),
            _traced(data),
        ),
        (
            "simulated",
            milliseconds(numbers["simulated_step_seconds"]),
            percent(numbers["simulated_bubble_fraction"]),
            OWN_TIMES,
        ),
    ]
    if data.prediction is not None:
        what = f"the cost model for cluster {data.prediction.cluster}"
        bubble = percent(numbers["predicted_bubble_fraction"])
        rows.append(("predicted", milliseconds(numbers["predicted_step_seconds"]), bubble, what))
    parts: list[str | Grid] = [Grid(("", "step", "bubble", "from"), tuple(rows), ("from",))]
    if data.prediction is None:
        parts.append(f"No prediction of the cost model: {data.why_no_prediction}")
    loss = summary.get("final_loss")
    parts.append(
        f"{data.num_steps} steps on {data.plan.world_size} ranks, final loss "
        f"{'-' if loss is None else f'{loss:.4f}'}, "
        f"{summary.get('tokens_per_second') or 0:,.0f} {summary.get('unit') or 'tokens'}/s by the "
        "clock, data loading included."
    )
    return PageSection("The step, three times", parts)


OWN_TIMES = "the schedule with the mean times of that step's own actions, waits left out"


def _traced(data: RunData) -> str:
    numbers = list(data.steps)
    return f"the median of the traced steps {numbers[0]} to {numbers[-1]}"


def _timelines(data: RunData, simulated: Timeline) -> PageSection:
    asynchronous = SCHEDULES[data.plan.pp.schedule].asynchronous
    measured = measured_timeline(data)
    drawn = [
        measured,
        simulated,
        *([data.prediction.timeline] if data.prediction is not None else []),
    ]
    length = max(timeline.seconds for timeline in drawn) * 1e3
    line = lines_of(data.plan)
    pictures = [_legend(drawn)]
    parts: list[str | Spot] = [Spot("timelines", pictures)]
    if data.prediction is not None:
        predicted = _renamed(data.prediction.timeline, line)
        pictures.append(_picture(predicted, length, PREDICTED))
    pictures.append(_picture(_renamed(simulated, line), length, f"simulated: {OWN_TIMES}"))
    which = f"measured: {_which_steps(data)}"
    pictures.append(_picture(timeline_lanes(measured), length, which))
    if asynchronous:
        parts.append(
            "The schedule never drains: the simulated stretch begins with an empty pipeline, the "
            "measured one inside."
        )
    if len(line) < data.plan.world_size:
        parts.append(
            f"Predicted and simulated is one pipeline, "
            f"rank{'s' if len(line) > 1 else ''} {', '.join(map(str, line))}. "
            "The others do the same."
        )
    parts.extend(_left_out(data))
    return PageSection("Timelines", parts)


def _left_out(data: RunData) -> Iterator[str]:
    """A sentence where the predicted step is longer than its timeline: ranks that share cores."""
    if data.prediction is None:
        return
    shared = data.prediction.numbers.get("breakdown_seconds", {}).get("cores", 0.0)
    if shared:
        yield (
            f"The predicted timeline has a core for each rank. That there are fewer cores adds "
            f"{milliseconds(shared)} to the predicted step."
        )


def _legend(timelines: Sequence[Timeline]) -> Picture:
    kinds = {span.kind for timeline in timelines for span in timeline.spans}
    shown = [kind for kind in COLOURS if kind in kinds or kind in ("wait", "other")]
    return Picture(legend((NAMES.get(kind, kind.lower()), COLOURS[kind]) for kind in shown))


def _renamed(timeline: Timeline, line: Sequence[int]) -> list[Lane]:
    """Coordinates on the pipeline axis as the global ranks of a line."""
    found = zip(timeline.ranks, timeline_lanes(timeline), strict=True)
    return [Lane(f"rank {line[coordinate]}", lane.boxes) for coordinate, lane in found]


def _picture(rows: Sequence[Lane], length: float, caption: str) -> Picture:
    more = f" (the first {MAX_LANES} of {len(rows)} ranks)" if len(rows) > MAX_LANES else ""
    return Picture(
        lanes(rows[:MAX_LANES], Frame(length=length, unit="ms", row_height=24)), f"{caption}{more}"
    )


AT_PEAK = "all else, at the peak"


def _memory(data: RunData) -> PageSection:
    rows: list[Bar] = []
    if data.prediction is not None:
        memory = data.prediction.numbers["memory"]
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        rows.append(Bar("predicted, fullest rank", tuple((name, memory[name]) for name in kinds)))
    peaks = data.summary.get("peak_memory") or []
    for rank, state in enumerate(data.summary.get("state_memory") or []):
        rest = max(0, peaks[rank] - sum(state.values())) if rank < len(peaks) else 0
        rows.append(Bar(f"measured, rank {rank}", (*state.items(), (AT_PEAK, rest))))
    sentence = (
        "The state was measured between steps, the whole at its peak. Without a GPU the program "
        "and its libraries are a part of it; the prediction counts them as buffers. What came "
        f"after the model was begun is {_peak_of_training(data.summary)}."
        if peaks
        else ""
    )
    return PageSection("Memory", [Bars(rows[: MAX_LANES + 1]), *([sentence] if sentence else [])])


def _traffic(data: RunData) -> PageSection:
    counted: Mapping[str, float] = data.summary.get("traffic") or {}
    expected: Mapping[str, float] = (
        {} if data.prediction is None else data.prediction.numbers["traffic"]
    )
    axes = [
        axis
        for axis in dict.fromkeys([*expected, *counted])
        if expected.get(axis) or counted.get(axis)
    ]

    def row(axis: str) -> Iterator[Bar]:
        if data.prediction is not None:
            yield Bar(f"{axis}, predicted", ((axis, expected.get(axis, 0)),))
        yield Bar(f"{axis}, counted", ((axis, counted.get(axis, 0)),))

    rows = [bar for axis in axes for bar in row(axis)]
    return PageSection(
        "Traffic: what the busiest rank sent in a step",
        [Bars(rows) if rows else "Nothing was sent."],
    )


def _course(metrics: Sequence[JsonMapping]) -> PageSection:
    """Every step or, of many, some of them."""
    every = max(1, len(metrics) // 20)
    shown = [*metrics[:-1:every], metrics[-1]] if metrics else []

    def cell(value: JsonValue, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = tuple(
        (
            str(one["step"]),
            cell(one["loss"], ".4f"),
            cell(one["grad_norm"], ".3f"),
            cell(one["seconds"] * 1e3, ",.1f"),
        )
        for one in shown
    )
    grid = Grid(("step", "loss", "gradient norm", "ms"), rows)
    return PageSection("Course", [Spot("charts"), Folded("The steps as a table", grid)])
