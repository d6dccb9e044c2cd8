"""The page of `plait report`: timelines on one scale, then memory, traffic and the loss, promised
beside measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.doctor import findings
from plait.plan.facts import SCHEDULES
from plait.run.rundata import RunData, lines_of
from plait.run.rundir import RunFolder
from plait.trace import Timeline
from plait.trace.page import Grid, PageSection, Picture, page
from plait.trace.picture import COLOURS, Bar, Frame, Lane, bars, lanes, legend, timeline_lanes
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


def report_page(data: RunData, curves: str = "", policy: str = "") -> str:
    """The whole page; `curves` are HTML of our own, which draws the course under a `policy`."""
    sections = [
        _summary(data),
        _timelines(data),
        _memory(data),
        _traffic(data),
        _course(data.metrics, curves),
        *_recoveries(data),
        *_findings(data),
    ]
    return page(f"plait run {data.folder.resolve().name}: {data.plan}", sections, policy)


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
    parts: list[str | Grid] = [Grid(("", "step", "bubble", "from"), tuple(rows))]
    if data.prediction is None:
        parts.append(f"No prediction of the cost model: {data.why_no_prediction}")
    loss = summary.get("final_loss")
    parts.append(
        f"{summary.get('steps')} steps on {data.plan.world_size} ranks, final loss "
        f"{'-' if loss is None else f'{loss:.4f}'}, "
        f"{summary.get('tokens_per_second') or 0:,.0f} tokens/s by the clock, data loading "
        "included."
    )
    return PageSection("The step in numbers", parts)


OWN_TIMES = "the schedule with the mean times of that step's own actions, waits left out"


def _traced(data: RunData) -> str:
    numbers = list(data.steps)
    return f"the median of the traced steps {numbers[0]} to {numbers[-1]}"


def _timelines(data: RunData) -> PageSection:
    asynchronous = SCHEDULES[data.plan.pp.schedule].asynchronous
    measured = Timeline.merge(data.steps.values()) if asynchronous else data.steps[data.shown]
    drawn = [
        measured,
        data.simulated,
        *([data.prediction.timeline] if data.prediction is not None else []),
    ]
    length = max(timeline.seconds for timeline in drawn) * 1e3
    line = lines_of(data.plan)
    parts: list[str | Picture] = [_legend(drawn)]
    if data.prediction is not None:
        parts.append(
            _picture(
                _renamed(data.prediction.timeline, line),
                length,
                "predicted before the run, by the cost model",
            )
        )
    which = (
        f"steps {min(data.steps)} to {max(data.steps)}" if asynchronous else f"step {data.shown}"
    )
    parts.append(_picture(_renamed(data.simulated, line), length, f"simulated: {OWN_TIMES}"))
    parts.append(_picture(timeline_lanes(measured), length, f"measured: {which}"))
    if asynchronous:
        parts.append(
            "The schedule never drains: the simulated stretch begins with an empty pipeline, the "
            "measured one inside."
        )
    if len(line) < data.plan.world_size:
        parts.append(
            f"Predicted and simulated are one pipeline line, ranks {', '.join(map(str, line))}; "
            "the others do alike."
        )
    return PageSection("Timelines", parts)


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


def _memory(data: RunData) -> PageSection:
    rows: list[Bar] = []
    if data.prediction is not None:
        memory = data.prediction.numbers["memory"]
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        rows.append(
            Bar("predicted, fullest rank", tuple((name, memory[name] / 1e6) for name in kinds))
        )
    for rank, state in enumerate(data.summary.get("state_memory") or []):
        rows.append(
            Bar(
                f"measured, rank {rank}",
                tuple((name, count / 1e6) for name, count in state.items()),
            )
        )
    peaks = data.summary.get("peak_memory") or []
    said = (
        "Measured between steps: state alone. At its peak the fullest process held "
        f"{max(peaks) / 1e6:,.0f} MB."
        if peaks
        else ""
    )
    return PageSection(
        "Memory", [Picture(bars(rows[: MAX_LANES + 1], "MB")), *([said] if said else [])]
    )


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
            yield Bar(f"{axis}, predicted", ((axis, expected.get(axis, 0) / 1e6),))
        yield Bar(f"{axis}, counted", ((axis, counted.get(axis, 0) / 1e6),))

    rows = [bar for axis in axes for bar in row(axis)]
    return PageSection(
        "Traffic: MB sent by the busiest rank in a step",
        [Picture(bars(rows, "MB")) if rows else "Nothing was sent."],
    )


def _course(metrics: Sequence[JsonMapping], curves: str) -> PageSection:
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
    drawn = [Picture(curves)] if curves and metrics else []
    return PageSection("Course", [*drawn, Grid(("step", "loss", "gradient norm", "ms"), rows)])


def _recoveries(data: RunData) -> list[PageSection]:
    """The recoveries, and what was spent on them; no section where there is nothing of it."""
    recoveries = data.summary.get("recoveries") or []
    waits = [
        f"{num} {what} took {_ms(waited['seconds'] / num)} of a step each"
        for what in ("snapshots", "checkpoints")
        if (waited := data.summary.get(what)) and (num := waited["count"])
    ]
    parts: list[str | Grid] = []
    if recoveries:
        header = ("step", "lost ranks", "cause", "seconds", "plan", "steps repeated")
        parts.append(Grid(header, tuple(_recovery(one) for one in recoveries)))
    if waits:
        parts.append(f"{'; '.join(waits)}.")
    return [PageSection("Recoveries and their cost", parts)] if parts else []


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
    found = findings.read(RunFolder(data.folder).doctor)
    rows = tuple(
        (
            str(one["kind"]),
            "-" if one["rank"] is None else str(one["rank"]),
            "-" if one["step"] is None else str(one["step"]),
            str(one["where"]),
            str(one["cause"]),
            str(one["line"] or "-"),
        )
        for one in found
    )
    header = ("kind", "rank", "step", "where", "cause", "line")
    return [PageSection("Findings of the doctor", [Grid(header, rows)])] if rows else []


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
