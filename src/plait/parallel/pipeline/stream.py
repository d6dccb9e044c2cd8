"""An endless asynchronous schedule, one step at a time: fill, steady step and drain.

The steps of a stream are cut as in `steps`. From some step on each is the one before it, m
micro-batches later.
"""

from __future__ import annotations

from plait.parallel.pipeline.actions import COMPUTE, Action, Kind
from plait.parallel.pipeline.lower import add_reduce
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.steps import shifted, split_steps


class Stream:
    """The part of one rank (coordinate on the pp axis) in a stream of steps of m micro-batches."""

    def __init__(self, name: str, num_ranks: int, num_micro_batches: int, rank: int) -> None:
        self._name = name
        self._p = num_ranks
        self._m = num_micro_batches
        self._rank = rank
        self._fill = -(-(num_ranks - 1) // num_micro_batches)  # steps until the pipeline is full
        self._parts = self._cut(self._fill + 2)

    def _cut(self, num_steps: int) -> list[tuple[Action, ...]]:
        schedule = add_reduce(make(self._name, self._p, self._m, num_steps=num_steps))
        return [part.ranks[self._rank] for part in split_steps(schedule)]

    def step(self, number: int) -> list[Action]:
        """The actions of step `number`, from 0, with micro-batches numbered through all steps."""
        like = min(number, self._fill)
        return self._with_transfers(
            [shifted(action, (number - like) * self._m) for action in self._parts[like]]
        )

    def drain(self, num_steps: int) -> list[Action]:
        """The actions left after `num_steps` steps when no other follows."""
        if num_steps == 0:
            return []
        like = min(num_steps, self._fill + 1)
        last = self._cut(like)[-1]
        done = len(self._parts[like - 1])
        return self._with_transfers(
            [shifted(action, (num_steps - like) * self._m) for action in last[done:]]
        )

    def _with_transfers(self, actions: list[Action]) -> list[Action]:
        """A receive is posted one computing ahead of its use, a send follows its computing.

        Between two ranks all forwards go one way and all backwards the other, each in order.
        """
        result: list[Action] = []
        places: list[int] = []  # of the computing in `result`
        for action in actions:
            receive, send = self._transfers(action)
            if receive is not None:
                result.insert(places[-1] if places else len(result), receive)
                places = [place + 1 for place in places[-1:]]
            if action.kind in COMPUTE:
                places.append(len(result))
            result.append(action)
            if send is not None:
                result.append(send)
        return result

    def _transfers(self, action: Action) -> tuple[Action | None, Action | None]:
        stage = action.stage
        last = self._p - 1
        if action.kind is Kind.FORWARD:
            receive = Action(Kind.RECV_F, stage, action.micro_batch) if stage > 0 else None
            return receive, Action(Kind.SEND_F, stage, action.micro_batch) if stage < last else None
        if action.kind is Kind.BACKWARD:
            receive = Action(Kind.RECV_B, stage, action.micro_batch) if stage < last else None
            return receive, Action(Kind.SEND_B, stage, action.micro_batch) if stage > 0 else None
        return None, None
