"""A schedule is data: for each rank an ordered list of actions, and which rank holds which stage.

Everything that must be ordered with computing is an action, the optimizer update included. So one
list can be verified, simulated, drawn and executed. The weights that a forward sees follow from the
order alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from plait.errors import ScheduleError


class Kind(str, Enum):
    """The kind of an action; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward: input gradient and weight gradient
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECV_F = "RECV_F"  # post the receive of this stage's input (from stage - 1)
    SEND_F = "SEND_F"  # send this stage's output (to stage + 1)
    RECV_B = "RECV_B"  # post the receive of the gradient of this stage's output (from stage + 1)
    SEND_B = "SEND_B"  # send the gradient of this stage's input (to stage - 1)
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"  # arm: gradients of the next backward are reduced as they become ready
    UPDATE = "U"  # wait for the reductions, clip, update the weights

    @property
    def per_micro_batch(self) -> bool:
        """Whether actions of this kind name a micro-batch."""
        return self not in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE, Kind.UPDATE)


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
TRANSFER = frozenset({Kind.RECV_F, Kind.SEND_F, Kind.RECV_B, Kind.SEND_B})
_TEXT = re.compile(
    rf"(\d+)({'|'.join(sorted((kind.value for kind in Kind), key=len, reverse=True))})(\d+)?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one stage, and for one micro-batch where its kind says so."""

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"
        )

    @classmethod
    def parse(cls, text: str) -> Action:
        """An action from its text form.

        >>> Action.parse("2RECV_F0")
        Action(kind=<Kind.RECV_F: 'RECV_F'>, stage=2, micro_batch=0)

        Raises:
            ScheduleError: the text is no action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"'{text}' is no action; actions are a stage, a kind and a micro-batch: 2F0, "
                "2SEND_B1, 2U"
            )
        stage = int(match[1])
        kind = Kind(match[2])
        micro_batch = match[3]
        if kind.per_micro_batch is (micro_batch is None):
            raise ScheduleError(
                f"'{text}': {kind.value} {'needs a' if kind.per_micro_batch else 'takes no'} "
                "micro-batch"
            )
        return cls(kind, stage, None if micro_batch is None else int(micro_batch))


def forward(stage: int, micro_batch: int) -> Action:
    """`2F0`."""
    return Action(Kind.FORWARD, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """`2B0`."""
    return Action(Kind.BACKWARD, stage, micro_batch)


def input_grad(stage: int, micro_batch: int) -> Action:
    """`2I0`."""
    return Action(Kind.INPUT_GRAD, stage, micro_batch)


def weight_grad(stage: int, micro_batch: int) -> Action:
    """`2W0`."""
    return Action(Kind.WEIGHT_GRAD, stage, micro_batch)


def update(stage: int) -> Action:
    """`2U`."""
    return Action(Kind.UPDATE, stage)


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank for `num_micro_batches` micro-batches, in `num_steps` steps
    of equally many.

    `placement[stage]` is the rank (coordinate on the pp axis) that holds the stage. `delay` says
    which weights a forward sees. None means the newest on its stage. An integer d means the weights
    that are d updates away from its own update, the first after its backward. 0 is the weights that
    this update changes; 2BW has 1. `asynchronous`: steps overlap, nothing drains between them.
    """

    name: str
    placement: tuple[int, ...]
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    delay: int | None = None
    num_steps: int = 1
    asynchronous: bool = False

    @property
    def num_stages(self) -> int:
        """Stages, which are `virtual` times the ranks."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pp axis."""
        return len(self.ranks)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def with_ranks(self, ranks: Sequence[Sequence[Action]]) -> Schedule:
        """This schedule with other lists, as every pass returns it."""
        return replace(self, ranks=tuple(tuple(actions) for actions in ranks))

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.ranks for action in actions)


def straight(num_ranks: int) -> tuple[int, ...]:
    """Placement of one stage a rank: 0 1 2 3."""
    return tuple(range(num_ranks))


def looped(num_ranks: int, virtual: int) -> tuple[int, ...]:
    """Placement of `virtual` stages a rank in rounds: 0 1 2 3 0 1 2 3."""
    return tuple(range(num_ranks)) * virtual


def vee(num_ranks: int) -> tuple[int, ...]:
    """Placement of two stages a rank, down and up again: 0 1 2 3 3 2 1 0."""
    return tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))
