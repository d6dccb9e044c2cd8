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


class Runtime:
    """Executes `actions` in order, each under a span of its text and kind. A span begins where the
    one before ended.

    `current` names the action under way, and after an exception the one that raised it. Kinds in
    `optional` may lack a handler and are then left out of the list. A rank without sharded weights
    has nothing to unshard.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        handlers: Mapping[Kind, Handler],
        timeline: Timeline | None = None,
        optional: frozenset[Kind] = frozenset(),
    ) -> None:
        listed = list(actions)
        missing = sorted(
            {action.kind.value for action in listed if action.kind not in handlers}
            - {k.value for k in optional}
        )
        if missing:
            raise ScheduleError(
                f"no handler for {', '.join(missing)}; handlers: "
                f"{', '.join(sorted(k.value for k in handlers))}"
            )
        self.timeline = Timeline(enabled=False) if timeline is None else timeline
        self.current: Action | None = None
        self._program = [
            (action, handlers[action.kind]) for action in listed if action.kind in handlers
        ]

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions that will be executed."""
        return tuple(action for action, _ in self._program)

    def run(self) -> None:
        """Once through the list; an exception of a handler passes through, and `current` says
        where.
        """
        timeline = self.timeline
        began = timeline.now()
        for action, handler in self._program:
            self.current = action
            try:
                handler(action)
            finally:
                if timeline.enabled:
                    args = {"stage": action.stage, "micro_batch": action.micro_batch}
                    now = timeline.now()
                    timeline.add(
                        Span(
                            str(action), action.kind.value, timeline.rank, began, now - began, args
                        )
                    )
                    began = now
        self.current = None
