"""An explanation as lines for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from plait.explain.explanation import Explanation
from plait.explain.recording import RankRecording
from plait.explain.steps import Step
from plait.explain.words import block, details, sent, sentence
from plait.mesh import Shard
from plait.parallel.pipeline.actions import COMPUTE, Kind, Schedule
from plait.parallel.pipeline.clock import unit, walk
from plait.parallel.pipeline.weights import LAST_BACKWARD
from plait.values import JsonObject

WIDTH = 80
MOST_RANKS = 8
NAMES = (
    "X(W) and Y(W) are the input and the output of the layer with weight W, ^T is the "
    "transpose, d the gradient of the loss."
)


def lines(explanation: Explanation) -> Iterator[str]:
    """The whole text."""
    source = explanation.source
    yield f"{explanation.term}: {source.title}"
    yield ""
    yield from _wrapped(source.idea)
    yield ""
    yield from _labelled("formula", source.formula)
    yield from _labelled("paper", source.paper)
    yield from _labelled("case", f"{explanation.case.about}. {NAMES}")
    yield from _labelled("ranks", _ranks(explanation))
    yield ""
    yield from _holds(explanation)
    if explanation.routing:
        yield from _routing(explanation)
    if explanation.schedule is not None:
        yield from _pipeline(explanation, explanation.schedule)
    else:
        yield from _steps(explanation)
    yield ""
    yield from _totals(explanation)


def _ranks(explanation: Explanation) -> str:
    size = explanation.case.plan.world_size
    return f"{size}, run as threads by the code of a real run; every number is from that run"


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(text, f"{label:<9}", " " * 9)


def _holds(explanation: Explanation) -> Iterator[str]:
    yield "WHO HOLDS WHAT"
    recordings = explanation.recordings
    yield from _by_rank(held(explanation))
    memory = recordings[0].memory
    words = ", ".join(f"{kind} {size}" for kind, size in memory.items() if size)
    yield from _wrapped(f"after a step, in bytes: {words}", "  rank 0   ", " " * 11)


def _by_rank(texts: list[str]) -> Iterator[str]:
    """A paragraph for each rank, or one for all where they are alike."""
    if len(set(texts)) == 1 and len(texts) > 1:
        yield from _wrapped(texts[0], "  each    ", " " * 10)
        return
    for rank, text in enumerate(texts[:MOST_RANKS]):
        yield from _wrapped(text, f"  rank {rank:<3}", " " * 10)
    if len(texts) > MOST_RANKS:
        yield f"  (and {len(texts) - MOST_RANKS} more ranks; --json has all)"


def held(explanation: Explanation) -> list[str]:
    """The blocks of weights that each rank holds, and those that it updates."""
    return [_held(each) for each in explanation.recordings]


def after(explanation: Explanation) -> list[str]:
    """The weights that each rank has updated, when the run has ended."""
    return ["; ".join(map(block, each.after)) or "none" for each in explanation.recordings]


def _held(recording: RankRecording) -> str:
    text = "; ".join(map(block, recording.weights)) or "no whole weight between two uses"
    own = {shard.name: shard for shard in recording.updated}
    if _is_same(recording.weights, own):
        return text
    updates = "; ".join(map(block, recording.updated)) or "nothing"
    return f"{text}. Updates {updates}"


def _is_same(weights: list[Shard], own: dict[str, Shard]) -> bool:
    held = {shard.name: shard for shard in weights}
    return held.keys() == own.keys() and all(
        held[name].flat_range == own[name].flat_range for name in held
    )


def _routing(explanation: Explanation) -> Iterator[str]:
    yield ""
    yield "TOKENS AND THEIR EXPERTS, with the weight of each"
    for routed in explanation.routing:
        yield from _wrapped(tokens(routed), f"  rank {routed['rank']:<3}", " " * 10)


def tokens(routed: JsonObject) -> str:
    """The tokens of one rank with their experts, as a sentence."""
    each = zip(routed["tokens"], routed["experts"], routed["weights"], strict=True)
    return "; ".join(_token(*one) for one in each)


def _token(values: list[float], expert: int | None, weight: float) -> str:
    numbers = " ".join(f"{value:g}" for value in values)
    if expert is None:
        return f"[{numbers}] dropped: its expert is full"
    return f"[{numbers}] to expert {expert} ({weight:.3f})"


def _steps(explanation: Explanation) -> Iterator[str]:
    last_head = ""
    skipped = False
    for number, step in enumerate(explanation.steps, 1):
        if 1 < step.step < explanation.case.num_steps:
            if not skipped:
                yield ""
                yield f"STEPS 2 to {explanation.case.num_steps - 1}: as step 1"
            skipped = True
            continue
        head = _head(explanation, step)
        if head != last_head:
            yield ""
            yield head
            last_head = head
        yield from _step(number, step)


def _head(explanation: Explanation, step: Step) -> str:
    words = {"before": "BEFORE", "forward": "FORWARD", "backward": "BACKWARD", "update": "UPDATE"}
    head = words[step.phase]
    micro_batch = step.action.lstrip("0123456789").lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ_")
    if micro_batch and explanation.case.plan.micro_batches > 1:
        head += f" of micro-batch {micro_batch}"
    if explanation.case.num_steps > 1:
        head += f", step {step.step}"
    return head


def _step(number: int, step: Step) -> Iterator[str]:
    size = sent(step)
    text = sentence(step) + (f" ({size})" if size else "")
    yield from _wrapped(text, f"{number:>3}  ", "     ")
    for line in details(step):
        yield from _wrapped(line, "       ", "           ")


def _totals(explanation: Explanation) -> Iterator[str]:
    yield "SENT, all ranks together, as their ledgers counted it"
    totals = explanation.counted()
    if not totals:
        yield "  nothing: there is one rank"
    for op, (num, size) in totals.items():
        yield f"  {op:<15} {num:>5} times {size:>8} bytes"
    forms = sum(step.bytes for step in explanation.steps if step.axis and step.is_form)
    if forms:
        yield f"  ({forms} of these bytes say once which tensors will come)"
    losses = explanation.recordings[0].losses
    yield "  loss: " + ", ".join(f"{loss:.6g}" for loss in losses)
    yield ""
    times = "one update" if explanation.case.num_steps == 1 else "the last update"
    yield f"WEIGHTS AFTER {times}, where they are updated"
    yield from _by_rank(after(explanation))


# -- pipelines


def _pipeline(explanation: Explanation, schedule: Schedule) -> Iterator[str]:
    yield ""
    yield "THE SCHEDULE, from the actions that the ranks have walked"
    yield from _wrapped(
        "F forward, B backward, I and W its two halves (input and weight gradient), U update "
        "behind an action; forward, I and W take 1, a whole backward 2. A line is a moment; "
        "'keeps' counts the micro-batches whose activations a rank holds then.",
        "  ",
        "  ",
    )
    yield from _slots(schedule)
    simulation = explanation.simulation
    assert simulation is not None
    yield ""
    yield f"  bubble            {simulation.bubble_fraction:.1%} of the time is idle"
    yield f"  live activations  {_list(simulation.peak_activations)} at most, by stage"
    yield f"  weight versions   {_list(simulation.weight_versions)} by stage"
    yield ""
    yield "MICRO-BATCH 0, on its way through the stages"
    for number, step in enumerate(explanation.steps, 1):
        if _is_shown(step):
            rank = step.first.rank
            yield from _wrapped(
                f"rank {rank}, {step.action}: {sentence(step)}", f"{number:>3}  ", "     "
            )
            for line in details(step):
                yield from _wrapped(line.removeprefix(f"rank {rank}: "), "       ", "           ")


def _is_shown(step: Step) -> bool:
    text = step.action.lstrip("0123456789")
    kind = text.rstrip("0123456789")
    return text == f"{kind}0" and bool(step.first.operands) and not step.is_form


def _slots(schedule: Schedule) -> Iterator[str]:
    walked = walk(schedule, unit)
    cells: dict[tuple[int, int], str] = {}
    live: dict[tuple[int, int], int] = {}
    last = 0
    for event in walked.events:
        kind = event.action.kind
        start, end = round(event.start), round(event.end)
        if kind is Kind.UPDATE and (event.rank, start - 1) in cells:
            cells[event.rank, start - 1] += "U"
        if kind not in COMPUTE:
            continue
        last = max(last, end)
        cells[event.rank, start] = str(event.action)
        for slot in range(start + 1, end):
            cells[event.rank, slot] = "-"
        if kind is Kind.FORWARD:
            live[event.rank, start] = live.get((event.rank, start), 0) + 1
        if kind in LAST_BACKWARD:
            live[event.rank, end] = live.get((event.rank, end), 0) - 1
    num_ranks = schedule.num_ranks
    width = max(map(len, cells.values())) + 1
    yield "  time " + "".join(f"{f'r{rank}':<{width}}" for rank in range(num_ranks)) + "  keeps"
    kept = [0] * num_ranks
    for slot in range(last):
        kept = [kept[rank] + live.get((rank, slot), 0) for rank in range(num_ranks)]
        row = "".join(f"{cells.get((rank, slot), '.'):<{width}}" for rank in range(num_ranks))
        yield f"  {slot:>4} {row}  {_list(kept)}".rstrip()


def _list(values: list[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, values))
