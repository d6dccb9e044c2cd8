"""PipeDream and PipeDream-2BW: 1F1B that never drains; an update is an action, so versions follow
from the order.

A list is a stretch of the endless stream. It has `num_steps` steps of m micro-batches with one
warm-up before and one drain after. PipeDream updates a stage after each of its backwards. A forward
sees the newest weights of its stage, and its backward the same (stashed). So stage s keeps p - s
versions (Narayanan et al., arXiv 1806.03377, section 3.3: w(t-n+1) .. w(t)). 2BW gathers m >= p
micro-batches for an update. Every stage uses for them the weights before the newest, so two
versions everywhere (arXiv 2006.09503, section 3.1: W(t+1) = W(t) - lr * gradient at W(t-1)).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from plait.parallel.pipeline.actions import Action, Kind, Schedule, update
from plait.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from plait.parallel.pipeline.schedules.registry import generates


@generates("pipedream")
def pipedream(num_ranks: int, num_micro_batches: int, num_steps: int = 1) -> Schedule:
    """PipeDream (Narayanan et al. 2019, section 3.3): an update after every backward. A step of m
    micro-batches is m updates.
    """
    stream = one_f_one_b(num_ranks, num_micro_batches * num_steps)
    ranks = tuple(tuple(_updated(actions, every=1)) for actions in stream.ranks)
    return replace(stream, name="pipedream", ranks=ranks, num_steps=num_steps, asynchronous=True)


@generates("2bw")
def two_buffered_weights(num_ranks: int, num_micro_batches: int, num_steps: int = 1) -> Schedule:
    """PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503, section 3.1), for m >= p.

    An update a step, from the gradients of its m micro-batches, with weights one update old.
    """
    stream = one_f_one_b(num_ranks, num_micro_batches * num_steps)
    ranks = tuple(tuple(_updated(actions, every=num_micro_batches)) for actions in stream.ranks)
    return replace(stream, name="2bw", ranks=ranks, delay=1, num_steps=num_steps, asynchronous=True)


def _updated(actions: Iterable[Action], every: int) -> Iterator[Action]:
    for action in actions:
        yield action
        if (
            action.kind is Kind.BACKWARD
            and action.micro_batch is not None
            and (action.micro_batch + 1) % every == 0
        ):
            yield update(action.stage)
