"""Obey a schedule: one rank's list of actions against a table from kind to handler.

There is nothing to decide here: order is the schedule's, meaning is the handlers'. So the same loop
runs one stage or many, synchronous or not. A test can run it with handlers that only write down
their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Kind
from plait.trace import Span, Timeline

Handler = Callable[[Action], None]


def execute(
    actions: Iterable[Action],
    handlers: Mapping[Kind, Handler],
    timeline: Timeline,
    *,
    optional: frozenset[Kind] = frozenset(),
    begin: Callable[[str], None] = lambda text: None,
) -> None:
    """Execute `actions` in order, each under a span of its text and kind.

    A span begins where the one before ended. An exception of a handler passes through, and the last
    span is then of the action that raised it. Kinds in `optional` may lack a handler: their actions
    are left out (a rank without sharded weights has nothing to unshard). `begin` is called
    with each action's text before it.

    Errors: `ScheduleError` for a kind without a handler, before anything is executed.
    """
    program = [
        action for action in actions if action.kind in handlers or action.kind not in optional
    ]
    missing = {action.kind.value for action in program if action.kind not in handlers}
    if missing:
        raise ScheduleError(
            f"no handler for {', '.join(sorted(missing))}; handlers: "
            f"{', '.join(sorted(kind.value for kind in handlers))}"
        )
    began = timeline.now()
    for action in program:
        text = str(action)
        begin(text)
        try:
            handlers[action.kind](action)
        finally:
            if timeline.enabled:
                args = {"stage": action.stage, "micro_batch": action.micro_batch}
                now = timeline.now()
                kind = action.kind.value
                timeline.add(Span(text, kind, timeline.rank, began, now - began, args))
                began = now
