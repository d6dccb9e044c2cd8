"""The files of a run's folder, each held to its schema before anything is computed from it.

A killed run, a full disk or an editor may leave files that are whole JSON and no longer right. A
later reader gets a sentence with the file, the line and the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plait.errors import ConfigError, ScheduleError
from plait.parallel.pipeline.actions import Action
from plait.toml import parse_json
from plait.trace import Timeline
from plait.trace.chrome import DATA
from plait.values import JsonObject, JsonValue

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Bytes = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]  # microseconds
Whole = Annotated[int, Field(ge=0, le=10**15)]
Read = TypeVar("Read", bound=BaseModel)


class FileRecord(BaseModel):
    """The base of all records: more keys may be there, and none is converted."""

    model_config = ConfigDict(extra="allow", strict=True)


class StepRecord(FileRecord):
    """One line of `metrics.jsonl`."""

    step: Whole
    loss: float | None = None
    grad_norm: float | None = None
    seconds: Seconds


class RecoveryRecord(FileRecord):
    """One of the `recoveries` of `summary.json`."""

    step: Whole
    lost_ranks: list[Whole]
    cause: str
    seconds: Seconds | None = None
    plan_before: str
    plan_after: str
    steps_repeated: Whole | None = None


class WaitRecord(FileRecord):
    """The number of snapshots or checkpoints, and the seconds that steps waited for them."""

    count: Whole
    seconds: Seconds


class Summary(FileRecord):
    """The numbers of `summary.json` that a report shows."""

    steps: Whole | None = None
    final_loss: float | None = None
    tokens_per_second: Bytes | None = None
    unit: Literal["tokens", "samples"] | None = None
    traffic: dict[str, Bytes] | None = None
    peak_memory: list[Bytes] | None = None
    memory_before: list[Bytes | None] | None = None
    state_memory: list[dict[str, Bytes]] | None = None
    recoveries: list[RecoveryRecord] | None = None
    snapshots: WaitRecord | None = None
    checkpoints: WaitRecord | None = None


class SpanArguments(FileRecord):
    """The step of a span, where it was traced as one of a step."""

    step: Whole | None = None


class SpanEvent(FileRecord):
    """An action of the schedule."""

    ph: Literal["X"]
    name: str
    cat: str
    pid: Whole
    ts: Moment
    dur: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
    args: SpanArguments


class CommArguments(FileRecord):
    """Where a communication went, and how much."""

    axis: str
    op: str
    bytes: Bytes
    exposed_us: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class CommBegin(FileRecord):
    """The issue of a communication."""

    ph: Literal["b"]
    id: Whole
    pid: Whole
    ts: Moment
    args: CommArguments


class CommEnd(FileRecord):
    """The end of the wait for a communication, as a line of the trace has it."""

    ph: Literal["e"]
    id: Whole
    pid: Whole
    ts: Moment


class MemoryRecord(FileRecord):
    """Memory in use at a moment."""

    ph: Literal["C"]
    pid: Whole
    ts: Moment
    args: dict[str, Bytes]


EVENTS: dict[str, type[FileRecord]] = {
    "X": SpanEvent,
    "b": CommBegin,
    "e": CommEnd,
    "C": MemoryRecord,
}


def text_of(path: Path) -> str:
    """The text of a file. Raises `ConfigError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{path} cannot be read ({reason}); a run that has ended has it"
        ) from error


def summary_of(path: Path) -> JsonObject:
    """The object of `summary.json`. Raises `ConfigError` naming the key at fault."""
    given = _json(path)
    _held(Summary, given, str(path))
    return dict(given)


def metrics_of(path: Path) -> tuple[JsonObject, ...]:
    """The steps of `metrics.jsonl`. A kill may have cut the last line, which is left out.

    Raises `ConfigError` naming the line and the key.
    """
    text = text_of(path)
    lines = text.splitlines()
    steps = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            given = parse_json(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise ConfigError(f"{where}: this is no JSON ({error}); remove the line") from error
        _held(StepRecord, given, where)
        steps.append({"loss": None, "grad_norm": None, **given})
    return tuple(steps)


def timeline_of(path: Path) -> Timeline:
    """The traced steps of `trace.json`. Raises `ConfigError` naming the event and the key."""
    trace = _json(path)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path} is no trace of plait: it has no list 'traceEvents'")
    begun = set[int]()
    for number, event in enumerate(events):
        where = f"{path} is no trace of plait, event {number}"
        phase = event.get("ph") if isinstance(event, dict) else None
        if not isinstance(phase, str):
            raise ConfigError(f"{where}: an event is an object with a phase 'ph'")
        if phase not in EVENTS:
            continue
        record = _held(EVENTS[phase], event, where)
        if isinstance(record, SpanEvent) and record.cat != DATA and record.args.step is not None:
            _check_action(record, where)
        if isinstance(record, CommBegin):
            begun.add(record.id)
        if isinstance(record, CommEnd) and record.id not in begun:
            raise ConfigError(f"{where}: communication {record.id} ends and never began")
    return Timeline.from_chrome(trace)


def _check_action(span: SpanEvent, where: str) -> None:
    """A span of a step is an action of its schedule, under its own kind."""
    try:
        action = Action.parse(span.name)
    except (ScheduleError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if action.kind.value != span.cat:
        raise ConfigError(f"{where}: action {span.name} is said to be of kind '{span.cat}'")


def _json(path: Path) -> JsonValue:
    try:
        return parse_json(text_of(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error


def _held(schema: type[Read], given: JsonValue, where: str) -> Read:
    """The record, or one sentence for the first key at fault."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: an object of keys is needed, not {_short(given)}")
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            raise ConfigError(f"{where}: {key} is missing") from None
        shown = _short(fault["input"])
        raise ConfigError(f"{where}: {key} is {shown}; {fault['msg'].lower()}") from None


def _short(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
