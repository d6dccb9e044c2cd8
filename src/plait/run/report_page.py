"""The page of `plait report`: timelines on one scale, then memory, traffic and the loss, promised
beside measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from plait.doctor import findings
from plait.plan.facts import SCHEDULES
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
from plait.trace.units import size_words
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
        _timelines(data),
        _course(data.metrics),
        _memory(data),
        _traffic(data),
        _summary(data),
        *_recoveries(data),
        *_findings(data),
    ]
    top = Top(_lead(data), _cards(data))
    return page(f"plait run {data.folder.resolve().name}: {data.plan}", sections, top, drawing)


def pictures_of(data: RunData) -> JsonMapping:
    """The data of the page's curves and timelines."""
    line = lines_of(data.plan)
    measured = drawn_timeline(measured_timeline(data), f"measured: {_which_steps(data)}")
    promised = [drawn_timeline(data.simulated, f"simulated: {OWN_TIMES}", line)]
    word = "simulated"
    if data.prediction is not None:
        promised.insert(0, drawn_timeline(data.prediction.timeline, PREDICTED, line))
        word = "predicted"
    shown = [laid_over(measured, promised[0], word), *promised]
    guess = None if data.prediction is None else data.prediction.numbers
    runs = [{"name": str(data.plan), "steps": list(data.metrics), "predicted": guess}]
    return {"runs": runs, "timelines": shown}


PREDICTED = "predicted before the run, by the cost model"


def _lead(data: RunData) -> str:
    """One sentence of what happened, and one of what went wrong."""
    summary = data.summary
    first = data.metrics[0]["loss"] if data.metrics else None
    last = summary.get("final_loss")
    course = (
        "" if first is None or last is None else f"; the loss went from {first:.4g} to {last:.4g}"
    )
    text = (
        f"{summary.get('steps')} steps on {data.plan.world_size} ranks under {data.plan}{course}. "
    )
    numbers = data.numbers()
    measured = numbers["measured_step_seconds"]
    text += f"The actions of a step took {_ms(measured)}"
    predicted = numbers["predicted_step_seconds"]
    if predicted:
        text += f", and {_ms(predicted)} were predicted ({measured / predicted - 1:+.0%})"
    text += f"; the ranks stood idle for {_percent(numbers['measured_bubble_fraction'])} of it."
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
            "tokens a second",
            f"{summary.get('tokens_per_second') or 0:,.0f}",
            predicted("tokens_per_second", lambda value: f"{value:,.0f}"),
        ),
        Card("a step", _ms(numbers["measured_step_seconds"]), predicted("step_seconds", _ms)),
        Card(
            "bubble",
            _percent(numbers["measured_bubble_fraction"]),
            predicted("bubble_fraction", _percent),
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
            _ms(numbers["measured_step_seconds"]),
            _percent(numbers["measured_bubble_fraction"]),
            _traced(data),
        ),
        (
            "simulated",
            _ms(numbers["simulated_step_seconds"]),
            _percent(numbers["simulated_bubble_fraction"]),
            OWN_TIMES,
        ),
    ]
    if data.prediction is not None:
        what = f"the cost model for cluster {data.prediction.cluster}"
        bubble = _percent(numbers["predicted_bubble_fraction"])
        rows.append(("predicted", _ms(numbers["predicted_step_seconds"]), bubble, what))
    parts: list[str | Grid] = [Grid(("", "step", "bubble", "from"), tuple(rows), ("from",))]
    if data.prediction is None:
        parts.append(f"No prediction of the cost model: {data.why_no_prediction}")
    loss = summary.get("final_loss")
    parts.append(
        f"{summary.get('steps')} steps on {data.plan.world_size} ranks, final loss "
        f"{'-' if loss is None else f'{loss:.4f}'}, "
        f"{summary.get('tokens_per_second') or 0:,.0f} tokens/s by the clock, data loading "
        "included."
    )
    return PageSection("The step, three times", parts)


OWN_TIMES = "the schedule with the mean times of that step's own actions, waits left out"


def _traced(data: RunData) -> str:
    numbers = list(data.steps)
    return f"the median of the traced steps {numbers[0]} to {numbers[-1]}"


def _timelines(data: RunData) -> PageSection:
    asynchronous = SCHEDULES[data.plan.pp.schedule].asynchronous
    measured = measured_timeline(data)
    drawn = [
        measured,
        data.simulated,
        *([data.prediction.timeline] if data.prediction is not None else []),
    ]
    length = max(timeline.seconds for timeline in drawn) * 1e3
    line = lines_of(data.plan)
    pictures = [_legend(drawn)]
    parts: list[str | Spot] = [Spot("timelines", pictures)]
    if data.prediction is not None:
        predicted = _renamed(data.prediction.timeline, line)
        pictures.append(_picture(predicted, length, PREDICTED))
    pictures.append(_picture(_renamed(data.simulated, line), length, f"simulated: {OWN_TIMES}"))
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
            f"{_ms(shared)} to the predicted step."
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


def _recoveries(data: RunData) -> list[PageSection]:
    """The recoveries, and what was spent on them; no section where there is nothing of it."""
    recoveries = data.summary.get("recoveries") or []
    waits = [
        f"{num} {what}s took {_ms(waited['seconds'] / num)} of waiting each"
        if num > 1
        else f"1 {what} took {_ms(waited['seconds'])} of waiting"
        for what in ("snapshot", "checkpoint")
        if (waited := data.summary.get(f"{what}s")) and (num := waited["count"])
    ]
    parts: list[str | Grid] = []
    if recoveries:
        header = ("step", "lost ranks", "cause", "seconds", "plan", "steps repeated")
        parts.append(Grid(header, tuple(_recovery(one) for one in recoveries), ("cause", "plan")))
    if waits:
        parts.append(f"{'; '.join(waits)}.")
    title = "Recoveries and their cost" if recoveries else "Snapshots and checkpoints"
    return [PageSection(title, parts)] if parts else []


def _recovery(one: JsonMapping) -> tuple[str, ...]:
    """A row of the table."""
    before, after = one["plan_before"], one["plan_after"]
    seconds = one.get("seconds")
    repeated = one.get("steps_repeated")
    return (
        str(one["step"]),
        ", ".join(map(str, one["lost_ranks"])) or "-",
        one["cause"],
        "-" if seconds is None else f"{seconds:.2f}",
        before if before == after else f"{before}, then {after}",
        "-" if repeated is None else str(repeated),
    )


def _findings(data: RunData) -> list[PageSection]:
    """The findings of the doctor; no section where there is none."""
    entries = findings.read(RunFolder(data.folder).doctor)
    rows = tuple(
        (
            str(one["kind"]),
            "-" if one["rank"] is None else str(one["rank"]),
            "-" if one["step"] is None else str(one["step"]),
            str(one["where"]),
            str(one["cause"]),
            str(one["line"] or "-"),
        )
        for one in entries
    )
    header = ("kind", "rank", "step", "where", "cause", "line")
    return (
        [PageSection("Findings of the doctor", [Grid(header, rows, ("where", "cause", "line"))])]
        if rows
        else []
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
